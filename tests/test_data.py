"""Room 6: broken shards are refused, every token is served once in the documented order, for any number of ranks."""
import itertools
import json
import os
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_helpers import load_train_gpt
from shard_helpers import SHARDS, named_shard, pat, put_shard, raw_shard

GPT2_VOCAB, GPT2_EOD = 50_257, 50_256
EOD = 60000          # above int16, as all ids are kept in 16 bits


def refusal(tg, call):
    with pytest.raises(tg.Refusal) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- shards ----------------------------------------------------------------------------------------------------------


BROKEN = [
    ("TRUNC", ["header says 4,096 tokens (9,216 bytes)", "9,024", "delete", "download"]),
    ("ODD", ["header says 4,096 tokens (9,216 bytes)", "9,215", "delete", "download"]),
    ("EXTRA", ["header says 4,000 tokens (9,024 bytes)", "9,216", "delete", "download"]),
    (b"", ["0 bytes", "too short", "delete", "download"]),
    (bytes(500), ["500 bytes", "too short", "delete", "download"]),
    ("FMT32", ["20240801/7", "expected 20240520/1", "32-bit-token format"]),
    ("LFS", ["134 bytes", "too short to hold a shard header", "pointer text"]),
    (raw_shard(pat(100, 97, 1), version=2), ["20240520/2", "expected 20240520/1"]),
    (raw_shard(pat(100, 97, 1), magic=7), ["7/1", "expected 20240520/1"]),
    (pat(2000, 97, 1).tobytes(), ["raw tokens have none"]),
    (raw_shard(pat(100, 97, 1), count=-1), ["header says -1 tokens"]),
    (raw_shard([]), ["header says 0 tokens"]),
    (b"\x28\xb5\x2f\xfd" + bytes(2000), ["expected 20240520/1"]),
]


@pytest.mark.parametrize("content, parts", BROKEN)
def test_a_broken_shard_is_refused_with_its_name_and_what_to_do(tg, tmp_path, content, parts):
    path = tmp_path / "fineweb_train_000009.bin"
    path.write_bytes(named_shard(content) if isinstance(content, str) else content)
    text = refusal(tg, lambda: tg.TokenStream([str(path)], GPT2_VOCAB))
    for part in [path.name, *parts]:
        assert part in text


def test_a_shard_that_is_no_readable_file_is_refused(tg, tmp_path):
    folder = tmp_path / "train_0.bin"
    folder.mkdir()
    assert "train_0.bin: can't be read" in refusal(tg, lambda: tg.open_shard(str(folder)))
    assert "can't be read" in refusal(tg, lambda: tg.open_shard(str(tmp_path / "gone.bin")))


def test_a_shard_may_be_replaced_or_removed_once_it_is_open(tg, tmp_path):
    """As a download or a clean-up does it: the run goes on with the file it began with."""
    path = put_shard(tmp_path, "TRAIN_A")
    stream = tg.TokenStream([str(path)], GPT2_VOCAB)
    before = np.fromfile(path, "<u2", offset=1024).tolist()
    path.unlink()
    assert read(stream, 0, stream.num_tokens) == before


def test_a_shard_is_read_and_never_written(tg, tmp_path):
    path = put_shard(tmp_path, "TRAIN_A")
    path.chmod(0o444)
    before = path.read_bytes()
    tg.TokenStream([str(path)], GPT2_VOCAB).shards[0].zero_()
    assert path.read_bytes() == before


def test_no_shards_names_pattern_and_command(tg, tmp_path):
    text = refusal(tg, lambda: tg.find_shards(str(tmp_path / "*.bin"), "train"))
    assert str(tmp_path / "*.bin") in text and "python data/cached_fineweb10B.py" in text and "--train_files=" in text


@pytest.mark.parametrize("name", ["a,b", "a[1]", "a b", " a", "~a", "a{1}", "a*", "train_1.bin", ","])
def test_a_folder_may_have_any_name_and_means_its_shards(tg, tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.mkdir()
    for file in ("x_train_1.bin", "x_train_2.bin", "x_val_1.bin", "train.txt"):
        (folder / file).write_bytes(b"")
    wanted = [str(folder / "x_train_1.bin"), str(folder / "x_train_2.bin")]
    monkeypatch.chdir(tmp_path)
    for place in (str(folder), name):
        for pattern in (place, f"{place}/x_train_*.bin", f"{place}/x_train_1.bin,{place}/x_train_2.bin"):
            assert tg.find_shards(pattern, "train") == wanted, pattern
    assert tg.find_shards(str(folder), "val") == [str(folder / "x_val_1.bin")]


def test_the_home_folder_is_found_and_a_refusal_says_where_it_looked(tg, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_1.bin").write_bytes(b"")
    assert tg.find_shards("~/train_*.bin", "train") == [str(tmp_path / "train_1.bin")]
    assert tg.find_shards(" ~, ", "train") == [str(tmp_path / "train_1.bin")]
    assert f"{tmp_path}/x/*.bin, {tmp_path}/y" in refusal(tg, lambda: tg.find_shards("x/*.bin,~/y", "train"))


@pytest.mark.parametrize("patterns", ["nothing*.bin,train*.bin", "train*.bin,nothing*.bin", "", ","])
def test_a_pattern_without_a_file_is_refused_whatever_the_others_match(tg, tmp_path, monkeypatch, patterns):
    """A slip in one name must not train on less data without a word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_1.bin").write_bytes(b"")
    assert "no train shards match" in refusal(tg, lambda: tg.find_shards(patterns, "train"))


def test_shards_come_sorted_and_once_from_comma_separated_patterns(tg, tmp_path):
    for name in ("b_2.bin", "a_1.bin", "a_10.bin", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    found = tg.find_shards(f"{tmp_path}/b*.bin, {tmp_path}/*.bin,{tmp_path}/a_1.bin", "train")
    assert [os.path.basename(p) for p in found] == ["a_1.bin", "a_10.bin", "b_2.bin"]


def test_what_is_no_file_is_refused_before_it_is_opened(tg, tmp_path):
    """A pipe would wait for a writer; a folder or a link to nothing must not be a traceback."""
    put_shard(tmp_path, "TRAIN_A", "train_1.bin")
    path = tmp_path / "train_0.bin"
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("nothing"), lambda path: path.symlink_to(path),
                 lambda path: path.symlink_to("/dev/zero")):
        make(path)
        text = refusal(tg, lambda: tg.TokenStream(tg.find_shards(f"{tmp_path}/train_*.bin", "train"), GPT2_VOCAB))
        assert "train_0.bin: can't be read (no file)" in text and "--train_files" in text
        path.rmdir() if path.is_dir() else path.unlink()


def test_links_are_read_in_the_order_of_their_own_names(tg, tmp_path):
    """As in a download cache, where train_1 and train_2 are links to files named by hashes."""
    (tmp_path / "blobs").mkdir()
    for name, blob in (("train_1.bin", "ff"), ("train_2.bin", "00")):
        (tmp_path / "blobs" / blob).write_bytes(b"")
        (tmp_path / name).symlink_to(tmp_path / "blobs" / blob)
    found = tg.find_shards(f"{tmp_path}/*.bin", "train")
    assert found == [str(tmp_path / "train_1.bin"), str(tmp_path / "train_2.bin")]
    (tmp_path / "train_3.bin").symlink_to(tmp_path / "blobs" / "ff")           # a second name of train_1
    assert tg.find_shards(f"{tmp_path}/*.bin", "train") == found


def card_text(vocab_size, eod_id):
    return f'{{"tokenizer": "x", "vocab_size": {vocab_size}, "eod_id": {eod_id}}}'


@pytest.mark.parametrize("card, part", [
    ("{", "can't be read"), ('{"tokenizer": "bytes"}', "vocab_size"), ("[]", "card"), (card_text('"many"', 1), "many"),
    (card_text(257.9, 256), "257.9"), (card_text('"257"', 256), "'257'"), (card_text("Infinity", 256), "inf"),
    (card_text(70_000, 256), "70000"), (card_text(65_537, 256), "65537"), (card_text(257, 257), "257"),
    (card_text(257, -1), "-1"), (card_text("true", 0), "True"),
    ("[" * 100_000, "maximum recursion depth"), (b"\xff" * 5000, "utf-8"),
    ("folder", "no file"), ("link to nothing", "no file")])
def test_a_broken_dataset_card_is_refused(tg, tmp_path, card, part):
    if card == "folder":
        (tmp_path / "dataset.json").mkdir()
    elif card == "link to nothing":
        (tmp_path / "dataset.json").symlink_to(tmp_path / "blobs" / "gone")
    else:
        (tmp_path / "dataset.json").write_bytes(card if isinstance(card, bytes) else card.encode())
    text = refusal(tg, lambda: tg.dataset_card([str(tmp_path / "x.bin")]))
    assert "dataset.json" in text and part in text


def test_a_dataset_card_is_read_and_none_is_needed(tg, tmp_path):
    shard = str(tmp_path / "x.bin")
    assert tg.dataset_card([shard]) is None
    (tmp_path / "dataset.json").write_text(json.dumps(dict(tokenizer="bytes", vocab_size=257, eod_id=256, more=[1])))
    assert tg.dataset_card([shard]) == dict(tokenizer="bytes", vocab_size=257, eod_id=256)
    for vocab_size, eod_id in ((65_536, 65_535), (1, 0)):
        (tmp_path / "dataset.json").write_text(card_text(vocab_size, eod_id))
        assert tg.dataset_card([shard]) == dict(tokenizer="x", vocab_size=vocab_size, eod_id=eod_id)
    (tmp_path / "dataset.json").write_bytes(b'\xef\xbb\xbf{"vocab_size": 257, "eod_id": 256}')     # by Windows
    assert tg.dataset_card([shard]) == dict(tokenizer=None, vocab_size=257, eod_id=256)
    elsewhere = str(tmp_path / "more" / "y.bin")
    for paths in ([shard, elsewhere], [elsewhere, shard]):                                   # one is enough
        assert tg.dataset_card(paths)["vocab_size"] == 257


@pytest.mark.parametrize("num_tokens, marks, card, fine", [
    (100, 0, False, False), (100, 1, False, True), (2_000_001, 2, False, False), (2_000_000, 2, False, True),
    (100, 0, True, True)])
def test_shards_without_their_dataset_card_are_not_taken_for_gpt2s(tg, tmp_path, num_tokens, marks, card, fine):
    tokens = np.full(num_tokens, 65)
    tokens[:marks] = GPT2_EOD
    more = [np.full(2_000_000, 65)] if num_tokens == 100 else []          # what the first shard holds decides
    stream = write_stream(tmp_path, tokens, *more)
    if card:
        stream.card = dict(tokenizer="x", vocab_size=50_257, eod_id=GPT2_EOD)
    if fine:
        stream.need_documents(GPT2_EOD)
    else:
        text = refusal(tg, lambda: stream.need_documents(GPT2_EOD))
        assert "no end-of-document id 50256" in text and "train_000.bin" in text and "dataset.json" in text


# ---- streams ---------------------------------------------------------------------------------------------------------


def write_stream(folder, *shards, vocab=65_536):
    """A TokenStream over shards of these tokens."""
    paths = []
    for i, tokens in enumerate(shards):
        paths.append(folder / f"train_{i:03}.bin")
        paths[-1].write_bytes(raw_shard(tokens))
    return load_train_gpt().TokenStream([str(p) for p in paths], vocab)


def read(stream, start, stop):
    return stream.read(start, stop).tolist()


def test_tokens_of_all_16_bits_are_read_across_shard_borders(tg, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 65_536, 1000)
    tokens[:4] = 0, 32_767, 32_768, 65_535
    stream = write_stream(tmp_path, tokens[:300], tokens[300:301], tokens[301:])
    assert stream.num_tokens == 1000
    for start, stop in ((0, 1000), (299, 302), (300, 301), (0, 4), (301, 1000), (7, 7)):
        assert read(stream, start, stop) == tokens[start:stop].tolist()


def test_a_token_outside_the_vocabulary_is_refused_with_place_and_id(tg, tmp_path):
    stream = tg.TokenStream([str(put_shard(tmp_path, "OOV", "fineweb_train_000007.bin"))], GPT2_VOCAB)
    text = refusal(tg, lambda: stream.document_starts(0, GPT2_EOD))
    for part in ("fineweb_train_000007.bin", "token 60000", "position 3001", "50257"):
        assert part in text
    tokens = np.full(10 ** 6, 7)
    tokens[900_000:] = 300                           # the first of many, far into its shard
    stream = write_stream(tmp_path, [7] * 10, tokens, vocab=300)
    assert "token 300 at position 900000" in refusal(tg, lambda: stream.document_starts(1, 0))


@pytest.mark.parametrize("vocab", [257, 32_767, 32_768, 32_769, 50_257, 65_535])
def test_the_border_of_the_vocabulary_is_exact(tg, tmp_path, vocab):
    """Also beyond the ids that an int16 holds."""
    stream = write_stream(tmp_path, [0, 1, vocab - 1, 5], [0, vocab, 1], vocab=vocab)
    assert stream.document_starts(0, vocab - 1) == [2]
    assert f"token {vocab} at position 1" in refusal(tg, lambda: stream.document_starts(1, vocab - 1))


def test_marks_are_found_in_every_shard_and_beyond_the_first_million(tg, tmp_path):
    tokens = np.full(2 ** 20 + 10, 7)
    tokens[[0, 2 ** 20 - 1, 2 ** 20, 2 ** 20 + 9]] = EOD
    stream = write_stream(tmp_path, [1, EOD, 2], tokens)
    assert stream.document_starts(0, EOD) == [1] and stream.document_starts(0, 2) == [2]      # each asked for by itself
    assert stream.document_starts(1, EOD) == [3, 3 + 2 ** 20 - 1, 3 + 2 ** 20, 3 + 2 ** 20 + 9]


def test_only_documents_with_so_many_tokens_after_their_mark_are_hashed(tg, tmp_path):
    """A mark and 63 tokens are too short, also as the last of a shard; a mark and 64 are enough."""
    text = np.arange(64)
    stream = write_stream(tmp_path, [EOD, *text, EOD, *text[:63]], [7, EOD, *text, 9, EOD, *text[::-1]])
    first, second = (stream.document_hashes(k, EOD).tolist() for k in (0, 1))
    assert len(first) == 1 and len(second) == 2 and second[0] == first[0] != second[1]


def test_a_hash_is_of_the_64_tokens_after_the_mark_and_of_no_other(tg, tmp_path):
    """A copy stays one under another mark and with another end; another token, be it the last of them, makes none."""
    text = np.arange(64)
    stream = write_stream(tmp_path, [EOD, *text, 1, EOD, *text, 2, EOD, *text[:63], 7], [EOD - 1, *text])
    first, same, other = stream.document_hashes(0, EOD).tolist()
    [under_another_mark] = stream.document_hashes(1, EOD - 1).tolist()
    assert first == same == under_another_mark != other


def test_two_tokens_are_an_input_and_its_target_and_one_is_refused(tg, tmp_path):
    assert write_stream(tmp_path, [1], [2]).num_tokens == 2
    text = refusal(tg, lambda: write_stream(tmp_path, [EOD]))
    assert "train_000.bin" in text and "holds 1 token; expected 2" in text


# ---- documents and rows ----------------------------------------------------------------------------------------------


def naive_documents(tokens, begin=0):
    """(start, stop): from each mark to the next; the last token is nobody's input."""
    last = len(tokens) - 1
    starts = sorted({begin} | {i for i in range(begin, last) if tokens[i] == EOD})
    return [(a, b) for a, b in zip(starts, starts[1:] + [last]) if a < b]


def naive_rows(tokens, num_rows, row_tokens, clip, epochs=50):
    """Rows by the words of the documentation: the clipped documents one after the other, cut into rows."""
    whole = naive_documents(tokens)
    again = [(a, b) for a, b in whole if tokens[a] == EOD] or whole          # what no mark begins is seen once
    positions = [p for epoch in range(epochs) for a, b in (again if epoch else whole)
                 for p in range(a, min(b, a + clip) if clip else b)]
    assert len(positions) >= num_rows * row_tokens
    return [positions[i * row_tokens:(i + 1) * row_tokens] for i in range(num_rows)]


def expanded(rows):
    return [[p for a, b in row for p in range(a, b)] for row in rows]


def document_tokens(lengths, seed=0, lead=0):
    """Tokens of documents of these lengths, marks included, after `lead` tokens without a mark."""
    tokens = np.random.default_rng(seed).integers(0, EOD, lead + sum(lengths))
    at = lead
    for n in lengths:
        tokens[at] = EOD
        at += n
    return tokens


def test_without_clipping_every_token_is_served_once_in_order(tg, tmp_path):
    tokens = document_tokens([5, 30, 1, 1, 64, 7, 100, 3, 40])
    stream = write_stream(tmp_path, tokens[:37], tokens[37:90], tokens[90:])
    rows = tg.Planner(stream, EOD).rows((len(tokens) - 1) // 25, 25)
    assert [p for row in expanded(rows) for p in row] == list(range((len(tokens) - 1) // 25 * 25))


def test_clipping_drops_exactly_the_tails_and_counts_them(tg, tmp_path):
    lengths = [5, 30, 8, 1, 64, 9]
    tokens = document_tokens(lengths + [2])
    planner = tg.Planner(write_stream(tmp_path, tokens), EOD)
    starts = np.cumsum([0] + lengths[:-1])
    kept = [p for a, n in zip(starts, lengths) for p in range(a, a + min(n, 8))]
    rows = planner.rows(len(kept) // 19, 19, 8)
    assert [p for row in expanded(rows) for p in row] == kept[:len(kept) // 19 * 19]
    assert len(kept) == 2 * 19
    assert planner.position.dropped_tokens == sum(max(0, n - 8) for n in lengths)
    assert planner.rows(1, 1, 8) == [[(sum(lengths), sum(lengths) + 1)]]


def test_a_document_cut_by_a_rows_end_continues_in_the_next_row(tg, tmp_path):
    stream = write_stream(tmp_path, document_tokens([6, 20, 6]))
    assert tg.Planner(stream, EOD).rows(3, 10) == [[(0, 10)], [(10, 20)], [(20, 30)]]
    assert tg.Planner(stream, EOD).rows(2, 10, 12) == [[(0, 10)], [(10, 18), (26, 28)]]


def documents(tg, stream, count, epoch=0, begin=0, eod=EOD):
    """The first documents, (epoch, start, stop) each, from a position on."""
    return list(itertools.islice(tg.Planner(stream, eod).documents(epoch, begin), count))


def test_what_stands_before_the_first_mark_is_a_document_of_the_first_pass(tg, tmp_path):
    stream = write_stream(tmp_path, document_tokens([10, 10], lead=5))
    assert documents(tg, stream, 4) == [(0, 0, 5), (0, 5, 15), (0, 15, 24), (1, 5, 15)]
    assert tg.Planner(stream, EOD).rows(1, 10, 4) == [[(0, 4), (5, 9), (15, 17)]]
    no_mark = tg.TokenStream([str(put_shard(tmp_path, "NOBOS"))], GPT2_VOCAB)
    assert documents(tg, no_mark, 2, eod=GPT2_EOD) == [(0, 0, 4999), (1, 0, 4999)]


def test_a_document_runs_on_over_shard_borders(tg, tmp_path):
    tokens = document_tokens([4, 20, 5])
    stream = write_stream(tmp_path, tokens[:8], tokens[8:9], tokens[9:20], tokens[20:])
    assert documents(tg, stream, 3) == [(0, 0, 4), (0, 4, 24), (0, 24, 28)]
    assert documents(tg, stream, 2, epoch=3, begin=24) == [(3, 24, 28), (4, 0, 4)]
    assert documents(tg, stream, 1, epoch=3, begin=28) == [(4, 0, 4)]
    batch = next(tg.batches(tg.Planner(stream, EOD), [(2, 0)], 12, 0, 1))
    assert batch.inputs.flatten().tolist() == tokens[:24].tolist()
    assert batch.targets.flatten().tolist() == tokens[1:25].tolist()


def test_the_stream_wraps_at_its_end_and_the_last_token_is_only_a_target(tg, tmp_path):
    tokens = document_tokens([4, 9])
    planner = tg.Planner(write_stream(tmp_path, tokens), EOD)
    assert planner.rows(1, 10) == [[(0, 10)]] and planner.position.epoch == 0
    assert planner.rows(2, 10) == [[(10, 12), (0, 8)], [(8, 12), (0, 6)]]
    assert planner.position.epoch == 2
    batch = next(tg.batches(tg.Planner(planner.stream, EOD), [(3, 0)], 10, 0, 1))
    inputs = tokens[:12].tolist()
    assert batch.inputs.flatten().tolist() == (inputs * 3)[:30]
    assert batch.targets.flatten().tolist() == (tokens[1:13].tolist() * 3)[:30]        # true successors at the wrap too


@pytest.mark.timeout(30)          # a planner that waits for another mark would search for ever
def test_a_stream_whose_only_mark_is_its_last_token_begins_anew_at_its_first(tg, tmp_path):
    planner = tg.Planner(write_stream(tmp_path, [1, 2, 3, EOD]), EOD)
    assert planner.rows(2, 3) == [[(0, 3)], [(0, 3)]]


documents_drawn = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(lengths=documents_drawn, lead=st.integers(0, 5), row=st.integers(1, 30), clip=st.integers(0, 20),
       cuts=st.lists(st.integers(1, 100), max_size=3), seed=st.integers(0, 99), at=st.integers(0, 5))
def test_rows_are_those_of_the_naive_plan_and_a_position_resumes_them(tmp_path_factory, lengths, lead, row, clip, cuts,
                                                                      seed, at):
    tg = load_train_gpt()
    tokens = document_tokens(lengths, seed, lead)
    if len(tokens) < 3:
        return
    borders = sorted({cut for cut in cuts if cut < len(tokens)})
    pieces = [tokens[a:b] for a, b in zip([0] + borders, borders + [len(tokens)])]
    folder = tmp_path_factory.mktemp("stream")
    stream = write_stream(folder, *pieces)
    wanted = naive_rows(tokens.tolist(), 6, row, clip, epochs=200)
    planner = tg.Planner(stream, EOD)
    first = planner.rows(at, row, clip)
    saved = tg.Position(*json.loads(json.dumps(planner.position)))        # plain numbers
    rest = planner.rows(6 - at, row, clip)
    assert expanded(first + rest) == wanted
    assert tg.Planner(stream, EOD, saved).rows(6 - at, row, clip) == rest
    assert saved.dropped_tokens <= planner.position.dropped_tokens


# ---- batches ---------------------------------------------------------------------------------------------------------


PLAN = [(6, 0), (12, 10), (6, 10), (6, 0)]


def served(tg, stream, rank, size, position=None, plan=PLAN):
    planner = tg.Planner(stream, EOD, position or tg.Position())
    return list(tg.batches(planner, plan, 16, rank, size))


@pytest.fixture
def stream(tmp_path):
    tokens = document_tokens([5, 30, 1, 64, 7, 100, 3, 40, 77, 20])
    return write_stream(tmp_path, tokens[:100], tokens[100:])


@pytest.mark.parametrize("size", [2, 3, 6])
def test_ranks_share_the_rows_of_one_in_order(tg, stream, size):
    alone = served(tg, stream, 0, 1)
    ranks = [served(tg, stream, rank, size) for rank in range(size)]
    for step, batch in enumerate(alone):
        assert batch.inputs.shape == batch.targets.shape == (PLAN[step][0], 16)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int32
        for field in ("inputs", "targets"):
            assert torch.equal(torch.cat([getattr(r[step], field) for r in ranks]), getattr(batch, field))
        assert all(r[step].position == batch.position for r in ranks)


@pytest.mark.parametrize("size", [*range(1, 9), 16])
def test_any_number_of_ranks_shares_the_rows_of_one(tg, stream, size):
    """Rows that no rank needs are empty: marks without targets."""
    ranks = [served(tg, stream, rank, size) for rank in range(size)]
    for step, batch in enumerate(served(tg, stream, 0, 1)):
        num_rows = PLAN[step][0]
        per_rank = tg.rows_per_rank(num_rows, size)
        assert per_rank * size - size < num_rows <= per_rank * size
        assert all(rank[step].inputs.shape == rank[step].targets.shape == (per_rank, 16) for rank in ranks)
        inputs, targets = (torch.cat([getattr(rank[step], field) for rank in ranks]) for field in ("inputs", "targets"))
        assert torch.equal(inputs[:num_rows], batch.inputs) and torch.equal(targets[:num_rows], batch.targets)
        assert bool((inputs[num_rows:] == EOD).all()) and bool((targets[num_rows:] == -1).all())
        assert all(rank[step].position == batch.position for rank in ranks)


def test_a_loader_resumed_at_a_batchs_position_goes_on_with_the_next(tg, stream):
    alone = served(tg, stream, 0, 1)
    for step in range(3):
        again = served(tg, stream, 0, 1, alone[step].position, PLAN[step + 1:])
        for a, b in zip(again, alone[step + 1:]):
            assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) and a.position == b.position


def test_targets_are_the_true_successors_of_their_inputs(tg, stream):
    tokens = torch.tensor(read(stream, 0, stream.num_tokens))
    rows = tg.Planner(stream, EOD).rows(6, 16) + tg.Planner(stream, EOD).rows(12, 16, 10)
    for spans in rows:
        [inputs], [targets] = tg.fill_rows(stream, [spans], (1, 16), EOD)
        at = torch.tensor(expanded([spans])[0])
        assert torch.equal(inputs.long(), tokens[at]) and torch.equal(targets.long(), tokens[at + 1])


def test_errors_of_the_loading_thread_surface_in_the_loop(tg, tmp_path):
    good, bad = document_tokens([50, 50]), document_tokens([50, 50])
    bad[70] = 65_000
    stream = write_stream(tmp_path, good, bad, vocab=EOD + 1)
    loader = tg.batches(tg.Planner(stream, EOD), [(1, 0)] * 20, 25, 0, 1)
    text = refusal(tg, lambda: list(loader))
    assert "train_001.bin: token 65000 at position 70" in text


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_for_a_gpu_are_made_in_pinned_memory(tg, stream, monkeypatch, pinned):
    asked, full = [], torch.full
    def look(*args, pin_memory=False, **more):
        asked.append(pin_memory)                     # not to be had without a GPU
        return full(*args, **more)
    monkeypatch.setattr(torch, "full", look)
    assert len(list(tg.batches(tg.Planner(stream, EOD), PLAN, 16, 0, 1, pinned))) == len(PLAN)
    assert asked == [pinned] * 2 * len(PLAN)


@pytest.mark.parametrize("ahead", [0, 3])
def test_the_loader_is_so_many_steps_ahead_and_no_more(tg, stream, ahead):
    taken = []
    def plan():
        for step in PLAN * 3:
            taken.append(step)
            yield step
    loader = tg.batches(tg.Planner(stream, EOD), plan(), 16, 0, 1, ahead=ahead)
    for done, (num_rows, _) in enumerate(PLAN * 3, 1):
        assert len(next(loader).inputs) == num_rows
        assert len(taken) == min(12, done + ahead)
    assert list(loader) == []


def test_a_loader_that_is_dropped_early_leaves_no_thread(tg, stream):
    import threading
    before = threading.active_count()
    loader = tg.batches(tg.Planner(stream, EOD), [(1, 0)] * 100, 16, 0, 1)
    next(loader)
    loader.close()
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


# ---- validation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_targets", [1, 15, 16, 17, 160, 299, 300])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("overlap, num_rows", [(0, 1), (0, 3), (4, 2), (12, 4)])
def test_validation_scores_each_target_exactly_once(tg, tmp_path, num_targets, size, overlap, num_rows):
    """On any number of ranks, each row beginning with the true context of its first target."""
    tokens = document_tokens([50, 101, 100, 50])
    stream = write_stream(tmp_path, tokens[:120], tokens[120:])
    batches = {}
    for rank in range(size):
        found = tg.validation_rows(stream, num_targets, 16, overlap, num_rows, EOD, rank, size)
        for k, (inputs, targets) in enumerate(found):
            assert inputs.shape == targets.shape == (num_rows, 16) and inputs.dtype == targets.dtype == torch.int32
            batches[rank + k * size] = inputs, targets
    rows = -(-num_targets // (16 - overlap))
    assert sorted(batches) == list(range(-(-rows // num_rows)))
    at = 0                                                       # the next target, counted from 0
    for k in sorted(batches):
        for inputs, targets in zip(*batches[k]):
            scored = (targets >= 0).nonzero().flatten().tolist()
            if not scored:
                assert at == num_targets and bool((inputs == EOD).all())         # fills up the last batch
                continue
            first, count = scored[0], len(scored)
            assert scored == list(range(first, first + count)) and first == min(at, overlap)
            assert inputs[:first + count].tolist() == tokens[at - first:at + count].tolist()
            assert targets[first:first + count].tolist() == tokens[at + 1:at + count + 1].tolist()
            assert bool((inputs[first + count:] == EOD).all())
            at += count
    assert at == num_targets


# ---- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checking_a_healthy_shard_of_100m_tokens_takes_half_a_second(tg, tmp_path):
    tokens = np.random.default_rng(0).integers(0, GPT2_EOD, 100_000_000, dtype=np.uint16)
    tokens[::700] = GPT2_EOD
    path = tmp_path / "train_0.bin"
    path.write_bytes(raw_shard(tokens))
    stream = tg.TokenStream([str(path)], GPT2_VOCAB)
    times = []
    for _ in range(5):
        begin = time.process_time()          # of the thread that works: other processes may hold the cores
        assert len(stream.document_starts(0, GPT2_EOD)) == -(-100_000_000 // 700)
        times.append(time.process_time() - begin)
    assert min(times) < 0.5


def test_the_named_shards_that_are_whole_are_accepted(tg, tmp_path):
    for name, tokens in (("TRAIN_A", 5000), ("TRAIN_B", 5000), ("VAL_10001", 10_001), ("NOBOS", 5000)):
        assert name in SHARDS
        assert len(tg.open_shard(str(put_shard(tmp_path, name, f"{name}.bin")))) == tokens
