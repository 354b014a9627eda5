"""Campaigns: random command lines and random damage to shards end in a run that does what was asked, or in one line.

Case n is made from seed n alone. A failing case says its seed; `config_case(tg, files, seed)` and
`shard_case(tg, folder, seed)` repeat it. Everyday runs take a sample, --all the whole campaign.
"""
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from model_helpers import SMALL, small_batches, small_options, without_launcher, write_small_shards
from shard_helpers import LFS_POINTER, raw_shard

import hub  # isort: skip (shard_helpers says where)
import verify

SECONDS_A_CASE = 20             # a case takes milliseconds; one that takes so long hangs
MEMORY = 3 * 2 ** 30            # what a campaign may map beyond what the process has: absurd sizes are to be refused


@contextlib.contextmanager
def limits():
    """No case hangs or takes the machine's memory: too long or too much raises in the case."""
    def ring(number, frame):
        raise TimeoutError(f"still busy after {SECONDS_A_CASE} s")
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, hard))
    handler, left = signal.signal(signal.SIGALRM, ring), signal.getitimer(signal.ITIMER_REAL)[0]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)      # pytest-timeout's
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def campaign(case, seeds):
    """Run case(seed) for all seeds; -> how many ended how. The first that goes wrong is raised with its seed."""
    ends, began = Counter(), time.monotonic()
    with limits():
        for seed in seeds:
            signal.setitimer(signal.ITIMER_REAL, SECONDS_A_CASE)
            try:
                ends[case(seed)] += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    print(f"{len(seeds)} cases in {time.monotonic() - began:.0f} s: {dict(ends)}")
    return ends


def sample_and_all(sample, everything):
    whole = pytest.param(range(everything), id=f"{everything}", marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [pytest.param(range(sample), id=f"{sample}"), whole])


def readable(text):
    """A message for people: one line of printable characters that does not fill the screen."""
    assert text and text.isprintable() and len(text) < 900, text[:2000]
    return text


# ---- configurations --------------------------------------------------------------------------------------------------


WILD = ["", " ", "0", "-0", "-1", "1", "2", "3", "7", "1.0", "2.5", "1e3", "-1e-9", "nan", "-nan", "inf", "-inf",
        "Infinity", "1e308", "1e309", "5e-324", "1e-30", "1e18", "9223372036854775807", "9223372036854775808",
        "4294967296", "2147483648", "2147483647", "65536", "65537", "1000000", "9" * 30, "9" * 5000, "1" + "0" * 400,
        "0x10", "1_000", "1,2", "0,", ",", ",,", "0,0", "0,x", "-1,0", "99999999999999999999,1", "0,1,2,3,4,5",
        "(0,1)", "[]", "None", "true", "TRUE", "off", "on", "yes", "auto", "flex", "record", "tiny", "latest", "=",
        "==", "a=b", "--seed=1", "\u0663", "\uff11", "\u00b2", "\u00bd", "caf\u00e9", "\U0001f600", "1\n2", "\n",
        "\t3", "5 ", "\x1b[31m", "\x7f", "a\u2028b", "\udc80", "\u202e1", "*", "?", "[", "[!]", "**", "/", ".",
        "/dev/null", "/dev/zero", "~", "$HOME", "%s", "{}", "'", "\"", "\\", "x" * 300, "x" * 5000, "a,b,,c"]
FLOATS = ["0.5", "1", "0.1", "1e-3", "2", "0.9", "10", "0.99", "0", "1e-10", "30"]
INTS = ["0", "1", "2", "3", "4", "5", "8", "12", "16", "20", "32", "48", "50", "60", "61", "64", "100", "128", "256",
        "768", "1024"]
TUPLES = ["", "0", "1", "5", "0,1", "0,5", "3,3", "2,3,4", "40,60", "100", "7,11,13", "64,0", "1000000"]
BARE = ("compile", "attention", "fp8", "deterministic", "self_check")


def misspelt(rng, key):
    """A key that is nearly right: a letter lost, doubled, swapped or exchanged, other case, hyphens, affixes."""
    at = rng.randrange(len(key))
    return rng.choice([
        key[:at] + key[at + 1:], key[:at] + key[at] + key[at:], key[:at] + rng.choice("abz_-. \u0435") + key[at + 1:],
        key[:at] + key[at:at + 2][::-1] + key[at + 2:], key.upper(), key.title(), key.replace("_", "-"),
        key.replace("_", ""), key + "s", key + "_", "-" + key, "_" + key, "no_" + key, key.split("_")[0], key[:4],
        " " + key, key + " ", "", "preset.", rng.choice(WILD)])


def fitting(rng):
    """Options of a shape that should work: sizes that divide each other, down to the smallest there are."""
    block, layers = rng.choice([1, 2, 3, 8, 16]), rng.randrange(1, 7)
    row, vocab = block * rng.choice([1, 3, 8, 16, 16]), rng.choice([61, 61, 61, 100, 128, 129, 1000])
    long, value = rng.randrange(layers), rng.choice(["", *range(layers)])
    without = rng.choice(["", *({*range(layers)} - {long, value})])
    return [f"--{key}={value}" for key, value in dict(
        block_tokens=block, row_tokens=row, batch_tokens=row * rng.randrange(1, 13), vocab_size=vocab,
        val_window_blocks=rng.randrange(1, 20), val_overlap=block * rng.choice([0, 0, 1, 3]),
        val_tokens=rng.choice([0, 1, 2, 500, 1000]),
        num_layers=layers, no_attention_layers=without, value_layers=value, num_heads=rng.randrange(1, 4),
        head_dim=4 * rng.randrange(2, 5), qk_dim=4 * rng.randrange(2, 5), copy_dim=rng.choice([8, 9, 16]),
        model_dim=rng.choice([16, 17, 32]), mlp_dim=rng.choice([16, 24, 64]), long_layers=long,
        table_rows=rng.choice([0, 1, 1, 50, 997, 997]), table_orders=rng.choice(["1", "2,3", "4", "2,3,4"]),
        num_steps=rng.choice([1, 2, 5, 300]), micro_rows=rng.choice([1, 2, 6, 100])).items()]


def random_option(tg, rng, wild):
    fields = {f.name: f.type for f in dataclasses.fields(tg.Config)}
    key = rng.choice(list(fields))
    words = [word for choices in tg.CHOICES.values() for word in choices] + ["flat", "latest"]
    text = rng.choice(WILD if rng.random() < wild else {int: INTS, float: FLOATS, str: words}.get(fields[key], TUPLES))
    if fields[key] is int and rng.random() < 0.5:           # near a number that works, sometimes far above
        near = int(SMALL.get(key, 1) * rng.choice([0, 0.25, 0.5, 1, 2, 3, 4])) + rng.choice([0, 0, 0, -1, 1])
        text = str(near * rng.choice([1, 1, 1, 1, 1, 1, 1, 2 ** rng.randrange(50)]))
    if rng.random() < wild / 10:
        text = "".join(chr(rng.randrange(1, rng.choice([128, 0x3000]))) for _ in range(rng.randrange(12)))
    if rng.random() < wild / 3:
        key = misspelt(rng, key)
    shapes = [f"{key}={text}", f"-{key}={text}", f"--{key}", f"--{key} {text}"]
    return rng.choice(shapes) if rng.random() < wild / 8 else f"--{key}={text}"


def random_options(tg, rng, files):
    """-> (command line, the options in it that were drawn)."""
    wild = rng.choice([0.02, 0.4])
    fit = fitting(rng) if rng.random() < 0.5 else []
    odd = [random_option(tg, rng, wild) for _ in range(rng.choice([1, 1, 2, 3, 5]))]
    names = {key_of(word) for word in odd}
    drawn = [word for word in fit if key_of(word) not in names] + odd
    if rng.random() < 0.03:
        drawn.append(rng.choice(odd))
    names = {key_of(word) for word in drawn}
    base = [word for word in small_options(**files) if key_of(word) not in names] if rng.random() < 0.95 else []
    argv = base + drawn
    rng.shuffle(argv)
    return argv, drawn


def key_of(word):
    return word.removeprefix("--").partition("=")[0].replace("-", "_")


def as_asked(tg, word):
    """(key, value) that an option asks for by the README's rules. Raises when it asks for nothing that is there."""
    kinds = {f.name: f.type for f in dataclasses.fields(tg.Config)}
    assert word.startswith("--")
    key, equals, text = word[2:].partition("=")
    key = key.replace("-", "_")
    if not equals:
        assert key in BARE
        text = "on"
    if kinds[key] is int:
        return key, int(text)
    if kinds[key] is float:
        return key, float(text)
    if kinds[key] is str:
        return key, text
    return key, tuple(float(part) if "." in part else int(part) for part in text.split(",") if part)


def parameters(c):
    width = c.num_heads * c.head_dim
    tables = c.padded_vocab * (c.model_dim + len(c.value_layers) * width)
    tables += len(c.table_orders) * c.table_rows * c.model_dim
    attentions = (c.num_layers - len({*c.no_attention_layers})) * (width + c.num_heads * c.qk_dim)
    return tables + 2 * c.model_dim * (attentions + c.num_layers * c.mlp_dim)


def small_enough(c):
    """Whether this machine should build and step it; the trainer itself refuses only what no machine could."""
    width = c.num_heads * c.head_dim
    attention = c.batch_tokens * c.row_tokens * c.num_heads
    widest = c.batch_tokens * max(c.padded_vocab, c.mlp_dim, c.model_dim, width, c.num_heads * c.qk_dim, c.copy_dim)
    return parameters(c) < 2e7 and attention < 2e7 and widest < 2e7 and c.num_layers < 50


def tame(c):
    """No number so extreme that losses may overflow."""
    return all(1e-12 <= value <= 100 or value == 0 for key, value in dataclasses.asdict(c).items()
               if isinstance(value, float) and key != "target_loss"
               ) and 0.1 <= min(c.softcap[::2]) <= max(c.softcap) <= 100


def refused_with_its_name(error, words):
    """A refusal names one of the options that were drawn, as far as they have a name."""
    text = readable(str(error))
    names = [key_of(word)[:20] for word in words] + [ascii(word)[1:-1][:20] for word in words] + ["--:"]
    assert any(name in text for name in names if name), (text, words)


def config_case(tg, files, seed):
    rng = random.Random(seed)
    argv, drawn = random_options(tg, rng, files)
    try:
        config, overrides = tg.parse_config(argv)
    except tg.Refusal as error:
        refused_with_its_name(error, drawn)
        return "refused as options"
    wanted = [as_asked(tg, word) for word in argv]
    assert len({key for key, _ in wanted}) == len(argv)
    for key, value in wanted:
        assert type(getattr(config, key)) is type(value) and getattr(config, key) == value, key
    assert overrides == {key: value for key, value in wanted if key != "preset"}
    if not small_enough(config):
        assert config.num_steps <= 10 ** 6 and config.batch_tokens <= 2 ** 26
        if parameters(config) > 10 ** 12:                # 4 TB: refused before a byte of it is allocated
            with pytest.raises(tg.Refusal, match="parameters need .* GB on each rank"):
                tg.check_memory(config, tg.World(), tg.Kernels())
        return "accepted, too large to try"
    try:
        run = tg.build(config, tg.World(), overrides)
        tg.budget(run.config, run.train_stream)
    except tg.Refusal as error:
        text = readable(str(error))
        assert any(f.name in text for f in dataclasses.fields(config)) or ".bin" in text, text
        return "refused by build"
    return works(tg, run, config)


def works(tg, run, config):
    """The run holds what the configuration says, and steps."""
    c, model = run.config, run.model
    assert c == dataclasses.replace(config, val_tokens=config.val_tokens or run.val_stream.num_tokens - 1)
    assert model.embed.shape == (c.padded_vocab, c.model_dim) and len(model.blocks) == c.num_layers
    assert len(model.ngrams) == len(c.table_orders) * c.table_rows + 1
    assert model.value_embeds.shape == (c.padded_vocab, len(c.value_layers) * c.num_heads * c.head_dim)
    assert {i for i, row in enumerate(model.layers) if row.attention == "long"} == set(c.long_layers)
    assert {i for i, block in enumerate(model.blocks) if block.attention is None} == set(c.no_attention_layers)
    if c.compile == "on":
        return "built (compiling takes too long here)"
    with contextlib.closing(small_batches(run)) as loader:
        batch = next(loader)
    assert batch.inputs.shape == (tg.rows_at(c, 0), c.row_tokens)
    try:
        if c.self_check == "on":
            tg.self_check(run, tg.RunLog(os.devnull, tg.World(1, 2)))
        stats, loss = tg.train_step(run, 0, batch, tg.lr_scale_at(c, 0)), tg.evaluate(run)
        tg.need_finite("step 1", {"something": 0.0 if bool(stats.isfinite().all()) else np.nan, "the loss": loss})
    except tg.Failure as error:
        readable(str(error))
        assert not tame(c), (str(error), c)
        return "failed on absurd rates"
    return "worked"


@sample_and_all(40, 1500)
def test_random_command_lines_work_or_are_refused_in_a_line(tg, tmp_path, monkeypatch, seeds):
    without_launcher(monkeypatch)
    monkeypatch.chdir(tmp_path)
    files = write_small_shards(tmp_path)
    ends = campaign(lambda seed: config_case(tg, files, seed), seeds)
    assert sum(ends.values()) == len(seeds)
    assert ends["worked"] >= len(seeds) // 8 and ends["refused as options"] >= len(seeds) // 4, ends


# ---- shards ----------------------------------------------------------------------------------------------------------


KINDS = {           # of a small data set: (vocabulary, end of document, what stands beside the shards)
    "card": (61, 60, "dataset.json of our own tools"),
    "hub": (50_257, 50_256, "a .json for each shard, of the downloader"),
    "bare": (50_257, 50_256, "nothing"),
}
OPTIONS = ["--preset=tiny", "--model_dim=16", "--num_layers=1", "--num_heads=1", "--head_dim=8", "--qk_dim=8",
           "--mlp_dim=16", "--no_attention_layers=",
           "--value_layers=", "--table_rows=50", "--batch_tokens=512", "--row_tokens=32", "--val_tokens=0",
           "--val_overlap=0", "--num_steps=2"]
NAMES = ("train_000000.bin", "train_000001.bin", "val_000000.bin")


def make_set(folder, kind, rng):
    """A healthy small data set; -> {name: bytes} of all that is in the folder."""
    vocab, eod, _ = KINDS[kind]
    random_ids = np.random.default_rng(rng.randrange(2 ** 32))
    card = dict(format=1, tokenizer="words", vocab_size=vocab, eod_id=eod)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in NAMES:
        tokens = random_ids.integers(0, eod, rng.randrange(150, 1200)).astype("<u2")
        tokens[random_ids.random(len(tokens)) < 1 / 40] = eod
        tokens[0] = eod
        (folder / name).write_bytes(raw_shard(tokens))
        sha256 = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        side = card.setdefault(name.split("_")[0], dict(documents=0, tokens=0, shards=[]))
        side["documents"] += int((tokens == eod).sum())
        side["tokens"] += len(tokens)
        side["shards"].append(dict(file=name, tokens=len(tokens), sha256=sha256))
        if kind == "hub":
            hub.remember(folder / name, hub.Remote("a/b", name, name),
                         hub.Facts((folder / name).stat().st_size, sha256, "c", sha256))
    if kind == "card":
        (folder / "dataset.json").write_text(json.dumps(card))
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def put(path, what):
    """Bytes, or something that is no file: folder, link, pipe, nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if isinstance(what, bytes):
        path.write_bytes(what)
    elif what == "folder":
        path.mkdir()
    elif what == "full folder":
        (path / "train_000009.bin").mkdir(parents=True)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "unreadable":
        path.write_bytes(b"secret")
        path.chmod(0)
    elif what != "nothing":
        path.symlink_to({"dangling link": "gone.bin", "link to itself": path.name, "link to the device": "/dev/zero",
                         "second name": next(name for name in NAMES if name != path.name)}[what])


NO_FILE = ["folder", "full folder", "dangling link", "link to itself", "link to the device", "second name", "pipe",
           "nothing", *(["unreadable"] if os.geteuid() else [])]        # root reads everything


def spoil_shard(path, kind, whole, rng):
    """Damage to one shard; -> its name."""
    vocab, eod, _ = KINDS[kind]
    blob, what = bytearray(whole[path.name]), rng.choice([
        "header bit", "body bit", "body bit", "body bit", "bits", "cut header", "cut body", "cut one", "longer",
        "magic", "version", "count", "zeros", "empty", "all zeros", "header only", "one token", "big id", "big id",
        "no marks", "all marks", "foreign", "no file", "no file", "copy", "joined", "shifted"])
    body = np.frombuffer(bytes(blob[1024:]), "<u2").copy()

    def integer(at, value):
        blob[at:at + 4] = (value % 2 ** 32).to_bytes(4, "little")
    if what == "header bit":
        blob[rng.randrange(12)] ^= 1 << rng.randrange(8)
    elif what == "body bit":
        blob[rng.randrange(1024, len(blob))] ^= 1 << rng.randrange(8)
    elif what == "bits":
        for _ in range(rng.randrange(2, 50)):
            blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
    elif what.startswith("cut"):
        size = len(blob)
        del blob[rng.randrange(*{"cut header": (1024,), "cut body": (1024, size), "cut one": (size - 1, size)}[what]):]
    elif what == "longer":
        blob += rng.randbytes(rng.choice([1, 2, rng.randrange(1, 5000)]))
    elif what == "magic":
        integer(0, rng.choice([0, -1, 20_240_801, int.from_bytes(blob[:4], "big"), rng.getrandbits(32)]))
    elif what == "version":
        integer(4, rng.choice([0, 2, 7, -1, rng.getrandbits(32)]))
    elif what == "count":
        integer(8, rng.choice([len(body) - 1, len(body) + 1, 0, -len(body), 2 ** 31, -1, rng.getrandbits(32)]))
    elif what == "zeros":
        begin = rng.randrange(len(blob))
        length = min(rng.randrange(1, 600), len(blob) - begin)
        blob[begin:begin + length] = bytes(length)
    elif what in ("empty", "all zeros"):
        blob = bytearray(len(blob) if what == "all zeros" else 0)
    elif what in ("header only", "one token"):
        blob = bytearray(raw_shard(body[:what == "one token"]))
    elif what == "big id":
        where = [rng.randrange(len(body)) for _ in range(rng.choice([1, 1, 5]))]
        body[where] = rng.choice([vocab, 65_535, rng.randrange(vocab, 65_536)])
        blob = bytearray(raw_shard(body))
    elif what in ("no marks", "all marks"):
        body[(body == eod) | (what == "all marks")] = 7 if what == "no marks" else eod
        blob = bytearray(raw_shard(body))
    elif what == "foreign":
        start = rng.choice([LFS_POINTER, b"<!DOCTYPE html><html>", b'{"error": 404}', b"\x1f\x8b\x08", b"PK\x03\x04",
                            b"PAR1", b"\x28\xb5\x2f\xfd", b"\x93NUMPY\x01", b"hello\n", rng.randbytes(4)])
        blob = bytearray(start + rng.choice([b"", bytes(3000), rng.randbytes(2000)]))
    elif what == "copy":
        blob = bytearray(whole[rng.choice([name for name in NAMES if name != path.name])])
    elif what == "joined":
        blob += whole[rng.choice(NAMES)]
    elif what == "shifted":
        blob = blob[:1024] + blob[1025:] + blob[1024:1025]
    put(path, rng.choice(NO_FILE) if what == "no file" else bytes(blob))
    return path.name


ODD_JSON = ["null", "true", "[]", "{}", "0", "-1", "1", "2", "60", "61", "1e400", "-1e400", "NaN", "Infinity",
            "60.0", "60.5", "1e2", "\"60\"", "\"\"", "\"bytes\"", "\"gpt2\"", "\"\\u0000\"", "\"\\ud800\"",
            "\"a\\nb\"", "65536", "65537", "1" + "0" * 30, "9" * 5000, "[[1]]", "{\"a\": 1}",
            "[" * 5000 + "]" * 5000, "[" * 100_000 + "]" * 100_000, "\"../x\"", "\"/\"", "\"train_000000.bin\"",
            "\"" + "0" * 64 + "\"", "\"" + "x" * 3000 + "\""]


def spoil_json(path, rng):
    """Damage to a dataset.json or to what the downloader noted; -> its name."""
    text, what = path.read_text(), rng.choice([
        "value", "value", "value", "value", "key", "twice", "cut", "bit", "whole", "bytes", "no file"])
    found, places = json.loads(text), []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])
    walk(found)
    node, key = rng.choice(places)
    blob = text.encode()
    if what == "value":
        node[key] = "HERE"
        blob = json.dumps(found).replace("\"HERE\"", rng.choice(ODD_JSON), 1).encode()
    elif what == "key":
        node.pop(key)
        blob = json.dumps(found).encode()
    elif what == "twice" and isinstance(node, list):
        node.append(node[key])
        blob = json.dumps(found).encode()
    elif what == "cut":
        blob = blob[:rng.randrange(len(blob))]
    elif what == "bit":
        at = rng.randrange(len(blob))
        blob = blob[:at] + bytes([blob[at] ^ 1 << rng.randrange(8)]) + blob[at + 1:]
    elif what == "whole":
        blob = rng.choice(ODD_JSON).encode()
    elif what == "bytes":
        blob = rng.choice([b"", b"\xef\xbb\xbf" + blob, text.encode("utf-16"), blob.replace(b"w", b"\xff"), bytes(50),
                           blob * 2, b"\x1f\x8b\x08"])
    put(path, rng.choice([kind for kind in NO_FILE if kind != "second name"]) if what == "no file" else blob)
    return path.name


def trained_on(tg, folder):
    """The trainer's cheap checks and a batch; -> (tokens of train, of val, first inputs, first targets). May refuse."""
    files = [f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_*.bin"]
    config, overrides = tg.parse_config([*OPTIONS, *files])
    run = tg.build(config, tg.World(), overrides)
    tg.budget(run.config, run.train_stream)
    with contextlib.closing(small_batches(run)) as loader:
        batch = next(loader)
    seen = []
    for stream in (run.train_stream, run.val_stream):
        seen.append(stream.read(0, stream.num_tokens).tolist())
    assert max(seen[1]) < run.config.vocab_size
    return *seen, batch.inputs.flatten().tolist(), batch.targets.flatten().tolist()


def in_files(folder, pattern):
    """The tokens that the format promises, read without the project's code: of each file once, in order of names."""
    files = {path.resolve(): path for path in sorted(Path(folder).glob(pattern), reverse=True)}
    tokens = []
    for path in sorted(files.values()):
        found = np.fromfile(path, "<u2", offset=1024).tolist()
        assert np.fromfile(path, "<i4", count=3).tolist() == [20_240_520, 1, len(found)], f"{path} was accepted"
        tokens += found
    return tokens


def verified(folder):
    """(exit code, lines of faults) of data/verify.py."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = verify.main([str(folder)])
        err.flush()
    return code, err.buffer.getvalue().decode().split("\n")[:-1]


def judged(tg, folder, named):
    """What both say about a folder: (the trainer's refusal or None, verify's exit code, its faults)."""
    refusal = None
    try:
        train, val, inputs, targets = trained_on(tg, folder)
    except tg.Refusal as error:
        refusal = readable(str(error))
        assert any(name in refusal for name in [*named, "_files", "max_epochs"]), (named, refusal)
    else:
        assert train == in_files(folder, "train_*.bin") and val == in_files(folder, "val_*.bin")
        assert inputs == train[:128] and targets == train[1:129]
    code, faults = verified(folder)
    assert (code == 0) == (not faults) and code in (0, 1, 2), (code, faults)
    for line in faults:
        assert readable(line).startswith(("fault: ", "error: ")), line
    assert not faults or any(name in line for name in [*named, "overlap"] for line in faults), (named, faults)
    return refusal, code, faults


def shard_case(tg, folder, seed):
    rng = random.Random(seed)
    kind = rng.choice(list(KINDS))
    whole, spoiled = make_set(folder, kind, rng), []
    for _ in range(rng.choice([1, 1, 1, 2])):
        notes = [name for name in whole if name.endswith("json") and name not in spoiled]
        if notes and rng.random() < 0.3:
            spoiled.append(spoil_json(folder / rng.choice(notes), rng))
        else:
            spoiled.append(spoil_shard(folder / rng.choice(NAMES), kind, whole, rng))
    noted = any(name.endswith("json") for name in spoiled)
    refusal, code, faults = judged(tg, folder, [*spoiled, *(NAMES if noted else ())])
    for name in NAMES:
        path, note = folder / name, {"card": "dataset.json", "hub": f"{name}.json"}.get(kind)
        same = path.is_file() and path.read_bytes() == whole[name]
        if note and note not in spoiled and not same and (kind == "card" or os.path.lexists(path)):
            assert code == 1 and any(name in line for line in faults), f"{name} differs, verify says {faults}"
    if code == 0 and refusal:       # whatever verify.py passes can be trained on, if there is enough of it
        reasons = ("max_epochs", "shards match", "holds 1 token", "no end-of-document id")
        assert any(reason in refusal for reason in reasons), refusal
    return f"{'refused' if refusal else 'trained'}, verify.py {'said why' if code else 'found nothing'}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_that_is_whole_passes(tg, tmp_path, monkeypatch, kind):
    without_launcher(monkeypatch)
    make_set(tmp_path / "set", kind, random.Random(0))
    assert judged(tg, tmp_path / "set", []) == (None, 0, [])


@sample_and_all(40, 1500)
def test_random_damage_to_shards_is_refused_in_a_line_or_read_as_it_is(tg, tmp_path, monkeypatch, seeds):
    without_launcher(monkeypatch)
    ends = campaign(lambda seed: shard_case(tg, tmp_path / "set", seed), seeds)
    assert sum(ends.values()) == len(seeds)
    assert ends["refused, verify.py said why"] >= len(seeds) // 4, ends
    assert ends["trained, verify.py said why"] >= len(seeds) // 20, ends          # what only a checksum shows
