"""Using a trained model: sample.py, evaluate.py, export.py, load_example.py on a checkpoint of a small run."""
import contextlib
import dataclasses
import json
import math
import os
import pty
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from rank_helpers import ROOT, train_gpt_path
from run_helpers import byte_run, changed, checkpoints_in, run_here
from shard_helpers import raw_shard

from records import checkpoints, demo, evaluate, export, sample, slices

ITEMS = [   # our own: the right ending repeats the rhythm that the shards teach
    {"ctx": "The cat sat on the mat. The cat sat on the", "endings": ["mat.", "qzx!", "0000", "~~~~"], "label": 0},
    {"ctx": "abc abc abc abc", "endings": ["\u00e9\u00e8\u00ea", "abc", "\u4e2d\u6587"], "label": 1},
    {"ctx": "One two three one two", "endings": ["{{}}", "#$%^", "three", "@@@@"], "label": 2},
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """(checkpoint, result of its run) of a small byte model."""
    folder = tmp_path_factory.mktemp("trained")
    argv = byte_run(folder, "--checkpoint_every_steps=100", "--lr_embed=0.05", num_steps=100)
    (folder / "dataset.json").write_text(json.dumps(dict(tokenizer="bytes", vocab_size=257, eod_id=256)))
    result = run_here(0, 1, argv)[0]
    return checkpoints_in(folder)[-1], result


@pytest.fixture
def loaded(tg, trained):
    return checkpoints.load_model(trained[0], device="cpu")


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a tool's main in this process; -> (status, output, errors)."""
    def run(tool, *args):
        monkeypatch.setattr(sys, "argv", [f"{tool.__name__.rpartition('.')[2]}.py", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            checkpoints.run_tool(tool.main)
        return left.value.code, *capsys.readouterr()
    return run


def call_process(tool, *args, **environment):
    """Run a tool as users do, from another folder; -> (status, output, errors)."""
    done = subprocess.run([sys.executable, str(ROOT / "records" / tool), *map(os.fsencode, map(str, args))], text=True,
                          timeout=120, capture_output=True, cwd="/", env=os.environ | environment)
    return done.returncode, done.stdout, done.stderr


def put_shard(path, tokens):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw_shard(np.array(tokens)))
    return path


def test_a_model_without_value_embeddings_can_be_used(tmp_path):
    run_here(0, 1, byte_run(tmp_path, "--checkpoint_every_steps=3", "--value_layers=", num_steps=3))
    assert checkpoints.load_model(checkpoints_in(tmp_path)[-1], device="cpu").config.value_layers == ()


# ---- sample ----------------------------------------------------------------------------------------------------------


def test_a_seed_gives_a_text_and_another_seed_another(loaded):
    texts = ["".join(sample.sample(loaded, "hello ", 30, 0.9, 50, seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("hello ") for text in texts)


def test_temperature_zero_takes_the_likeliest(loaded):
    likeliest = [*sample.generate(loaded, [256, 97], 10, temperature=0.0, seed=1)]
    assert len(likeliest) == 10
    assert likeliest == [*sample.generate(loaded, [256, 97], 10, temperature=0.7, top_k=1, seed=2)]


def never_ends(loaded):
    """Make the end of a document impossible."""
    with torch.no_grad():
        loaded.model.embed[256] = -loaded.model.embed[97] * 100
        loaded.model.pointer.copy_scales[1] = 1e4


def test_a_text_ends_with_its_document(loaded, monkeypatch):
    calls, forward = [], loaded.model.forward

    def ending(*args):
        """Two tokens that are no mark, then the mark."""
        calls.append(1)
        log_p = forward(*args).clone()
        log_p[..., 256] = 1.0 if len(calls) == 3 else -torch.inf
        return log_p
    monkeypatch.setattr(loaded.model, "forward", ending)
    tokens = [*sample.generate(loaded, [256, 97], 50, temperature=0.0)]
    assert len(tokens) == 2 and len(calls) == 3 and 256 not in tokens


def test_each_piece_of_text_is_shown_before_the_next_token_is_drawn(loaded, monkeypatch):
    calls, forward = [], loaded.model.forward
    monkeypatch.setattr(loaded.model, "forward", lambda *args: calls.append(1) or forward(*args))
    never_ends(loaded)
    pieces = sample.sample(loaded, "ab", 3, 0.0, 50, 0)
    assert (next(pieces), len(calls)) == ("ab", 0)
    assert [(len(piece), len(calls)) for piece in pieces] == [(1, 1), (1, 2), (1, 3), (0, 3)]


@pytest.mark.parametrize("text, pieces", [
    (b"ab", ["a", "b", ""]), ("\u00e9\u4e2da".encode(), ["\u00e9", "\u4e2d", "a", ""]),
    (b"a\xff\xff\xff\xff\xffb", ["a", "\ufffd" * 4, "\ufffdb", ""]), (b"a\xe4\xb8", ["a", "\ufffd"])])
def test_characters_are_shown_whole(loaded, text, pieces):
    assert [*sample.as_text(checkpoints.tokenizer_of(loaded), text)] == pieces


def test_padding_ids_are_never_drawn(tg, loaded):
    with torch.no_grad():
        loaded.model.embed[257:] = loaded.model.embed[97] * 100        # the padding looks likely
    never_ends(loaded)
    tokens = [*sample.generate(loaded, [256, 97], 200, seed=0, temperature=5.0, top_k=10 ** 6)]
    assert max(tokens) < 256 and len(tokens) == 200


def test_a_text_reads_the_logits_of_its_last_token(loaded):
    never_ends(loaded)
    text = [256, 97, *sample.generate(loaded, [256, 97], 70, temperature=0.0)]     # past the length of a row
    assert len(text) == 72
    for n in (2, 3, 17, 71):
        context = text[max(0, n - 64):n]
        row = torch.tensor([context + [7] * (-len(context) % 16)], dtype=torch.int32)     # what follows doesn't matter
        assert text[n] == int(loaded.model(row, None, loaded.view)[0, len(context) - 1, :257].argmax())


def test_256_tokens_of_the_demo_model_take_seconds(tg):
    config = tg.parse_config(["--preset=demo"])[0]
    endless = dataclasses.replace(config, eod_id=300)        # an id that only pads: it is never drawn
    loaded = checkpoints.Loaded(endless, tg.GPT(config).eval(), {"step": config.num_steps})
    began = time.process_time()                              # of this process alone: the machine may be busy
    assert len([*sample.generate(loaded, [256], 256, temperature=0.0)]) == 256
    assert time.process_time() - began < 15


def test_what_sample_does_without_options(loaded, trained, call, monkeypatch):
    asked = []
    monkeypatch.setattr(sample, "generate", lambda loaded, *args: asked.append(args) or iter(()))
    assert call(sample, trained[0])[0] == call(sample, trained[0], "ab")[0] == 0
    assert asked == [([256], 256, 0, 0.8, 50), ([256, 97, 98], 256, 0, 0.8, 50)]         # as its help says


def test_sample_from_the_command_line(trained, call):
    status, said, errors = call_process("sample.py", trained[0], "hello", "--tokens=20", "--seed=3")
    assert status == 0 and said.startswith("hello") and not errors, errors
    status, said, errors = call(sample, trained[0].parent, "hello")
    assert status == 2 and "checkpoint.json: can't be read" in errors and len(errors.splitlines()) == 1, errors


@pytest.mark.parametrize("args, words", [
    (["\udcff"], "the text is no UTF-8: character 1"), (["a", "--tokens=x"], "invalid int"),
    (["a", "--temperature=nan"], "--temperature=nan: expected a finite"), (["a", "--temperature=inf"], "a finite"),
    (["a", "--temperature=-1"], "at least 0"), (["a", "--tokens=-1"], "0 or more"), (["a", "--top_k=0"], "1 or more"),
    (["a", f"--seed={10 ** 20}"], "expected a whole number from 0 to 2^63 - 1"), (["a", "--seed=-1"], "from 0 to")])
def test_sample_refuses_in_one_line(trained, call, args, words):
    status, said, errors = call(sample, trained[0], *args)
    assert status == 2 and words in errors and len(errors.splitlines()) == 1 and not said, errors


def test_ctrl_c_ends_a_tool_without_a_word(call, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt
    monkeypatch.setattr(sample, "main", interrupted)
    assert call(sample) == (130, "", "")


def test_sample_on_odd_consoles(trained):
    """Output that nobody reads, that can't be written, or that only knows ASCII: no traceback."""
    status, said, errors = call_process("sample.py", trained[0], "\u00e9", "--tokens=1", PYTHONIOENCODING="ascii")
    assert status == 0 and said.startswith("\\xe9") and not errors
    status, said, errors = call_process("sample.py", trained[0], "\udcff")
    assert status == 2 and len(errors.splitlines()) == 1 and "no UTF-8" in errors
    command = f"{sys.executable} {ROOT}/records/sample.py {trained[0]} hello --tokens=30"
    for shell, status, lines in ((f"{command} | true; exit ${{PIPESTATUS[0]}}", 141, 0),
                                 (f"{command} >/dev/full", 1, 1), (f"{command} >&-", 0, 0)):
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
        assert done.returncode == status and len(done.stderr.splitlines()) == lines, (shell, done)


def test_an_own_tokenizer_is_named_and_no_cache_is_blamed(tg, loaded, monkeypatch):
    with pytest.raises(tg.Refusal, match="tokenizer 'our-bpe' .dataset.json., which is neither") as refusal:
        checkpoints.load_tokenizer("our-bpe", 1000, 999)
    assert "TIKTOKEN" not in str(refusal.value)
    with pytest.raises(tg.Refusal, match="no tokenizer is known for a vocabulary of 1,000 ids"):
        checkpoints.load_tokenizer(None, 1000, 999)
    tiktoken = pytest.importorskip("tiktoken")

    def nothing(name):
        raise OSError("word " * 100)
    monkeypatch.setattr(tiktoken, "get_encoding", nothing)
    with pytest.raises(tg.Refusal, match=r"word \.\.\.\); without a network"):          # cut between words
        checkpoints.load_tokenizer("gpt2", 50257, 50256)


def test_gpt2_tokens_need_their_files_and_say_so(tg, loaded, tmp_path, monkeypatch):
    from shard_helpers import fill_tiktoken_cache
    tiktoken = pytest.importorskip("tiktoken")
    big = loaded._replace(config=tg.Config(), facts={"run": {"data": {"tokenizer": None}}})

    def nothing(name):
        raise OSError(f"no network for {name}\nsecond line")
    monkeypatch.setattr(tiktoken, "get_encoding", nothing)
    with pytest.raises(tg.Refusal, match="tokenizer gpt2 is not to be had .OSError: no network for gpt2"):
        checkpoints.tokenizer_of(big)
    monkeypatch.undo()
    if fill_tiktoken_cache(tmp_path) is None:
        pytest.skip("GPT-2's files are not here")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    tokenizer = checkpoints.tokenizer_of(big)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.decode([50256, 15496, 995]) == "Hello world"
    assert tokenizer.lengths()[15496] == 5 and tokenizer.lengths()[50256] == 0 and len(tokenizer.lengths()) == 50257


# ---- evaluate --------------------------------------------------------------------------------------------------------


def test_evaluate_repeats_the_runs_own_loss(loaded, trained):
    found = evaluate.loss_on(loaded, loaded.config.val_files, loaded.config.val_tokens)
    assert found["targets"] == trained[1]["val_tokens"] and abs(found["loss"] - trained[1]["val_loss"]) < 1e-6


def test_bits_per_byte_count_bytes_only(tg, loaded):
    found = evaluate.loss_on(loaded, loaded.config.val_files)
    stream = tg.TokenStream(tg.find_shards(loaded.config.val_files, "val"), 257)
    tokens = stream.read(0, stream.num_tokens)
    size = int((tokens[1:] < 256).sum())
    assert size < found["targets"]
    assert math.isclose(found["bits_per_byte"], found["loss"] * found["targets"] / math.log(2) / size)


def test_a_loss_without_overlap_is_that_of_rows_cut_apart(tg, loaded):
    stream = tg.TokenStream(tg.find_shards(loaded.config.val_files, "val"), 257)
    tokens = stream.read(0, 161)
    by_hand = 0.0
    for first in range(0, 160, 32):
        inputs, targets = tokens[None, first:first + 32], tokens[None, first + 1:first + 33]
        by_hand += float(loaded.model(inputs.contiguous(), targets.contiguous(), loaded.view))
    found = evaluate.loss_on(loaded, loaded.config.val_files, 160, row_tokens=32, overlap=0)
    assert found["targets"] == 160 and found["loss"] == pytest.approx(by_hand / 160, rel=1e-5)
    assert abs(found["loss"] - evaluate.loss_on(loaded, loaded.config.val_files, 160, 32, 16)["loss"]) > 1e-4
    assert evaluate.loss_on(loaded, loaded.config.val_files, 160)["loss"] == pytest.approx(
        evaluate.loss_on(loaded, loaded.config.val_files, 160, 64, 16)["loss"], abs=0)
    common = int(tokens[1:].mode().values)                   # a letter, left out of the targets and not of the inputs
    for left_out in (256, common):
        without = evaluate.loss_on(loaded, loaded.config.val_files, 160, 32, 0, leave_out=left_out)
        kept = [float(loaded.model(tokens[None, first:first + 32].contiguous(), targets, loaded.view))
                for first in range(0, 160, 32) for targets in [tokens[None, first + 1:first + 33].masked_fill(
                    tokens[None, first + 1:first + 33] == left_out, -1)]]
        assert without["targets"] == 160 - int((tokens[1:] == left_out).sum())
        assert without["loss"] == pytest.approx(sum(kept) / without["targets"], rel=1e-5)


def test_shards_of_another_tokenizer_are_refused(tg, loaded, tmp_path):
    put_shard(tmp_path / "bytes" / "val_1.bin", [256, *b"hello world"])
    (tmp_path / "bytes" / "dataset.json").write_text('{"tokenizer": "bytes", "vocab_size": 257, "eod_id": 256}')
    config = dataclasses.replace(loaded.config, vocab_size=50257, eod_id=50256)
    gpt2 = loaded._replace(config=config, facts={"run": {"data": {}}})
    with pytest.raises(tg.Refusal, match=r"tokenizers differ: these shards are bytes .257 ids, end of document 256., "
                                         r"the model was trained on gpt2"):
        evaluate.open_shards(gpt2, f"{tmp_path}/bytes/*.bin")
    put_shard(tmp_path / "bare" / "val_1.bin", [256, *b"hello world"])
    with pytest.raises(tg.Refusal, match="no end-of-document id 50256 in them"):
        evaluate.open_shards(gpt2, f"{tmp_path}/bare/*.bin")
    assert evaluate.open_shards(loaded, f"{tmp_path}/bare/*.bin").num_tokens == 12
    put_shard(tmp_path / "other" / "val_1.bin", [256, *b"hello world"])
    card = tmp_path / "other" / "dataset.json"
    for tokenizer, eod_id in (("latin", 256), ("bytes", 0)):
        card.write_text(json.dumps(dict(tokenizer=tokenizer, vocab_size=257, eod_id=eod_id)))
        with pytest.raises(tg.Refusal, match="tokenizers differ"):        # also when only one of two folders is foreign
            evaluate.loss_on(loaded, f"{tmp_path}/bare/*.bin,{tmp_path}/other/*.bin")


def test_a_model_whose_tokenizer_nobody_named_takes_shards_of_its_vocabulary(tg, loaded, tmp_path):
    config = dataclasses.replace(loaded.config, vocab_size=300)
    nameless = loaded._replace(config=config, facts={"run": {"data": {}}})
    put_shard(tmp_path / "val_1.bin", [256, 0, *b"hello world"])
    for vocab_size, accepted in ((300, True), (299, False)):
        (tmp_path / "dataset.json").write_text(json.dumps(dict(tokenizer="x", vocab_size=vocab_size, eod_id=256)))
        if accepted:
            found = evaluate.loss_on(nameless, f"{tmp_path}/*.bin")
            assert found["bits_per_byte"] is None and found["targets"] == 12         # id 0 is a target like others
        else:
            with pytest.raises(tg.Refusal, match="shards are x .299 ids"):
                evaluate.open_shards(nameless, f"{tmp_path}/*.bin")


def test_multiple_choice(tg, loaded, tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(map(json.dumps, ITEMS)))
    items = evaluate.read_items(path)
    found = evaluate.choose(loaded, items)
    assert found == dict(items=3, acc=1.0, acc_norm=1.0)     # letters against signs that no shard holds
    wrong = [dict(item, label=(item["label"] + 1) % 3) for item in items]
    assert evaluate.choose(loaded, wrong)["acc"] == 0


def test_acc_norm_divides_by_bytes_and_contexts_begin_with_a_mark(loaded, monkeypatch):
    asked = []

    def scores(loaded, context, ending):
        asked.append((context, ending))
        return {b" \xc3\xa9\xc3\xa9": -9.0, b" ab": -6.0}[bytes(ending)]
    monkeypatch.setattr(evaluate, "log_probability", scores)
    item = {"ctx": "x", "endings": ["\u00e9\u00e9", " ab"], "label": 0}       # 5 and 3 bytes, 3 characters each
    assert evaluate.choose(loaded, [item, dict(item, label=1), dict(item, label=1), dict(item, label=1)]) == dict(
        items=4, acc=0.75, acc_norm=0.25)                                     # -6 > -9, but -9 / 5 > -6 / 3
    assert all(context == [256, ord("x")] for context, _ in asked)


@pytest.mark.parametrize("context", [3, 60, 61, 62, 63, 64, 200])
def test_a_long_context_loses_its_begin_and_nothing_else(loaded, context):
    context, ending = [256, *(97 + i % 7 for i in range(context))], list(b"wor")
    inputs = (context + ending)[-65:-1]                      # what a row of 64 tokens holds
    row = torch.tensor([inputs + [256] * (-len(inputs) % 16)], dtype=torch.int32)
    log_p = loaded.model(row, None, loaded.view)[0, len(inputs) - 3:len(inputs)]
    by_hand = log_p[range(3), ending].sum().item()
    assert evaluate.log_probability(loaded, context, ending) == pytest.approx(by_hand, abs=1e-5)


def test_an_ending_is_scored_whole_or_not_at_all(tg, loaded, trained, tmp_path, call):
    assert evaluate.log_probability(loaded, [256, 97], [98] * 64) < 0
    with pytest.raises(tg.Refusal, match="an ending of 65 tokens: a row of this model holds 64"):
        evaluate.log_probability(loaded, [256, 97], [98] * 65)
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(ITEMS[0]) + "\n\n" + json.dumps({"ctx": "a", "endings": ["b" * 64, "c"], "label": 0}))
    status, _, errors = call(evaluate, trained[0], f"--choices={path}")
    assert status == 2 and "line 3: an ending of 65 tokens" in errors and len(errors.splitlines()) == 1, errors


def test_the_score_of_an_ending_is_the_sum_over_its_tokens(tg, loaded):
    context, ending = [256, *b"hello "], list(b"wor")
    by_hand = 0.0
    for i, token in enumerate(ending):
        tokens = context + ending[:i]
        row = torch.tensor([tokens + [256] * (-len(tokens) % 16)], dtype=torch.int32)
        by_hand += loaded.model(row, None, loaded.view)[0, len(tokens) - 1].log_softmax(-1)[token].item()
    assert abs(evaluate.log_probability(loaded, context, ending) - by_hand) < 1e-4


@pytest.mark.parametrize("text", ["", "{}", '{"ctx": "\\ud800", "endings": ["b", "c"], "label": 1}',
                                  '{"ctx": "a", "endings": ["b", "c"], "label": -1}',
                                  "[1]", '{"ctx": "a", "endings": ["b"], "label": 1}', "no json",
                                  '{"ctx": "a", "endings": ["", "c"], "label": 1}',
                                  '{"ctx": "a", "endings": "bc", "label": 1}',
                                  '{"ctx": "a", "endings": {"b": 1, "c": 2}, "label": 1}',
                                  '{"ctx": "a", "endings": ["b", "c"], "label": 0.9}',
                                  '{"ctx": "a", "endings": ["b", "c"], "label": true}'])
def test_bad_items_are_refused_by_line(tg, tmp_path, text):
    path = tmp_path / "items.jsonl"
    path.write_text(text)
    with pytest.raises(tg.Refusal, match="line 1 is not|no items"):
        evaluate.read_items(path)


def test_evaluate_from_the_command_line(loaded, trained, tmp_path, call):
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(map(json.dumps, ITEMS)))
    status, said, errors = call(evaluate, trained[0], f"--choices={path}", f"--files={ROOT}/no/such/*.bin")
    assert status == 2 and "acc 1.0000" in said and "no val shards match" in errors, (said, errors)
    for wrong, words in (("--row_tokens=16", "smaller than a row"), ("--overlap=64", "smaller than a row"),
                         ("--overlap=-1", "0 or more"), ("--row_tokens=24", "a multiple of 16"),
                         ("--row_tokens=0", "a multiple of 16"), ("--slices=x", "expected name=pattern"),
                         ("--row_tokens=16777232", "a multiple of 16 up to 16777216"),
                         ("--tokens=-1", "0 (all)"),
                         ("--slices=a=x,a=y", "'a' is empty or comes twice"), ("--slices==y", "'' is empty")):
        status, said, errors = call(evaluate, trained[0], wrong)
        assert status == 2 and words in errors and len(errors.splitlines()) == 1 and not said, errors
    for row_tokens, overlap in ((32, 0), (32, 16), (64, 48)):
        status, said, errors = call(evaluate, trained[0], f"--row_tokens={row_tokens}", f"--overlap={overlap}")
        found = evaluate.loss_on(loaded, loaded.config.val_files, 0, row_tokens, overlap)
        assert status == 0 and not errors and said == (
            f"{found['loss']:.4f} nats per token over 699 targets, {found['bits_per_byte']:.4f} bits per byte\n")


def test_files_are_scored_whole_and_the_runs_own_as_far_as_the_run_did(tg, tmp_path, call):
    argv = byte_run(tmp_path, "--checkpoint_every_steps=3", num_steps=3)
    run_here(0, 1, changed(argv, "--val_tokens=100"))
    checkpoint, shard = checkpoints_in(tmp_path)[-1], tmp_path / "val_1.bin"
    for args, targets in (([], 100), ([f"--files={shard}"], 699), ([f"--files={shard}", "--tokens=50"], 50),
                          (["--tokens=0"], 699), (["--tokens=10000"], 699), (["--tokens=1"], 1)):
        status, said, errors = call(evaluate, checkpoint, *args)
        assert status == 0 and f"over {targets} targets" in said, (args, said, errors)


def test_only_the_runs_own_shards_are_scored_without_files(tmp_path, call):
    run_here(0, 1, byte_run(tmp_path, "--checkpoint_every_steps=3", num_steps=3))
    checkpoint, shard = checkpoints_in(tmp_path)[-1], tmp_path / "val_1.bin"
    tokens = shard.read_bytes()
    assert call(evaluate, checkpoint)[0] == 0
    more = put_shard(tmp_path / "val_2.bin", [256, *b"hello"])
    for words in ("val_2.bin: its fingerprint is", "val_1.bin: its fingerprint is", "no val shards match"):
        status, said, errors = call(evaluate, checkpoint)
        assert status == 2 and words in errors and not said and errors.count("\n") == 1, errors
        assert "--files=PATTERN" in errors and "--val_files" not in errors
        if more.exists():
            more.replace(shard)                              # other text in the run's place
        else:
            shard.unlink(missing_ok=True)
    put_shard(shard, [256, *b"hello"])
    assert "over 5 targets" in call(evaluate, checkpoint, f"--files={shard}")[1]
    shard.write_bytes(tokens)
    assert call(evaluate, checkpoint)[0] == 0


def test_relative_shards_are_found_from_the_folder_and_from_the_root(loaded, trained, tmp_path, monkeypatch, tg):
    relative = loaded._replace(config=dataclasses.replace(loaded.config, val_files="val_*.bin"))
    data, other = trained[0].parents[2], put_shard(tmp_path / "other" / "val_1.bin", [256, *b"hello"]).parent
    for folder, root in ((data, tmp_path), (tmp_path, data), (other, data)):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(checkpoints, "ROOT", root)
        assert evaluate.run_files(relative) == f"{data}/val_1.bin"
    monkeypatch.setattr(checkpoints, "ROOT", tmp_path)
    with pytest.raises(tg.Refusal, match="other/val_1.bin: its fingerprint is"):
        evaluate.run_files(relative)


# ---- slices ----------------------------------------------------------------------------------------------------------


def by_hand(loaded, files, log_p_of, count=48):
    """Nats per token of the first count targets by log_p_of(row): the first row without its overlap."""
    tg = checkpoints.import_trainer()
    tokens = tg.TokenStream(tg.find_shards(files, "val"), 257).read(0, count + 1)
    log_p = log_p_of(tokens[None, :-1].contiguous())[0]
    return -float(log_p[range(count), tokens[1:].long()].mean())


@torch.no_grad()
def test_slices_tell_what_table_and_pointer_are_worth(tg, loaded, monkeypatch):
    files = loaded.config.val_files
    torch.manual_seed(0)
    loaded.model.ngrams[:-1] += 0.1 * torch.randn_like(loaded.model.ngrams[:-1])
    before = {name: p.clone() for name, p in loaded.model.named_parameters()}
    found = evaluate.measure_slices(loaded, {"one": files}, num_targets=48)["one"]
    assert all((before[name] == p).all() for name, p in loaded.model.named_parameters())
    losses = found["loss"]

    def plain(row):
        return loaded.model(row, None, loaded.view)
    assert found["targets"] == 48 and losses["all on"] == pytest.approx(by_hand(loaded, files, plain), abs=1e-4)
    with monkeypatch.context() as patch:
        patch.setattr(loaded.model.pointer, "mix", lambda x, tokens, log_p, mask: log_p)
        assert losses["pointer off"] == pytest.approx(by_hand(loaded, files, plain), abs=1e-4)
    loaded.model.ngrams.zero_()
    assert losses["table zeroed"] == pytest.approx(by_hand(loaded, files, plain), abs=1e-4)
    assert len({round(loss, 3) for loss in losses.values()}) == 3
    assert found["files"] == [dict(file="val_1.bin", fingerprint=tg.fingerprint(tg.find_shards(files, "val")[0]))]


def test_slices_from_the_command_line(tg, loaded, trained, tmp_path, call, monkeypatch):
    val = put_shard(tmp_path / "b.bin", [256, *b"one two three " * 20])
    own = loaded.config.val_files
    status, said, errors = call(evaluate, trained[0], f"--slices=own={own},new={val},{val}")
    assert status == 0, errors
    *table, machine = said.splitlines()
    found = json.loads(machine)
    assert table[0].split() == "slice targets all on table zeroed pointer off bits/byte".split() and len(table) == 3
    assert {name: row["targets"] for name, row in found["slices"].items()} == dict(own=699, new=280)
    new, line = found["slices"]["new"], table[2].split()
    whole, zeroed = new["loss"]["all on"], new["loss"]["table zeroed"]
    assert line[:4] == ["new", "280", f"{whole:.4f}", f"{zeroed:.4f}"] and line[4] == f"({zeroed - whole:+.4f})"
    assert new["bits_per_byte"] == pytest.approx(whole / math.log(2)) and line[-1] == f"{new['bits_per_byte']:.4f}"
    assert found["parameters"]["ngrams"] > 0 and found["step"] == 100 and found["overlap"] == 16
    status, said, errors = call(evaluate, trained[0], f"--slices=own={own},new={val}", "--tokens=50")
    assert status == 0 and [row["targets"] for row in json.loads(said.splitlines()[-1])["slices"].values()] == [50, 50]
    status, said, errors = call(evaluate, trained[0], f"--slices=own={own}", "--row_tokens=32", "--overlap=0")
    found = json.loads(said.splitlines()[-1])
    assert (found["row_tokens"], found["overlap"], status) == (32, 0, 0)
    assert found["slices"]["own"]["loss"]["all on"] == pytest.approx(
        evaluate.loss_on(loaded, own, 0, 32, 0)["loss"], rel=1e-6)
    scored = []
    monkeypatch.setattr(evaluate, "loss_on", lambda *args: scored.append(args))
    status, said, errors = call(evaluate, trained[0], f"--slices=own={own},none={tmp_path}/none*.bin")
    assert status == 2 and not said and "none*.bin" in errors and not scored       # refused before anything is scored


def test_a_mixture_that_does_not_sum_to_one_has_no_loss(tg, loaded, trained, monkeypatch, call):
    files, pointer = loaded.config.val_files, loaded.model.pointer
    evaluate.check_mixture(loaded, files)
    mix, forward = pointer.mix, pointer.forward
    for extra, words in ((0.002, "sum to 1 only within 0.002"), (-0.002, "sum to 1 only within 0.002")):
        monkeypatch.setattr(pointer, "mix", lambda *args, extra=extra: mix(*args) + extra)
        with pytest.raises(tg.Failure, match=words):
            evaluate.check_mixture(loaded, files)

    def off_at_one_place(*args):
        log_p = mix(*args).clone()
        log_p[0, 20] += 0.002
        return log_p
    monkeypatch.setattr(pointer, "mix", off_at_one_place)
    with pytest.raises(tg.Failure, match="sum to 1 only within 0.002"):
        evaluate.check_mixture(loaded, files)
    monkeypatch.setattr(pointer, "mix", mix)
    row = tg.TokenStream(tg.find_shards(files, "val"), 257).read(0, 65)
    # 64 predictions: a loss that is wrong by 2%, or by 0.5%
    loss = float(loaded.model(row[None, :-1].contiguous(), row[None, 1:].contiguous(), loaded.view)) / 64
    for share, is_refused in ((0.02, True), (0.005, False), (-0.02, True)):
        monkeypatch.setattr(pointer, "forward", lambda *args, share=share: tuple(
            part + share * loss for part in forward(*args)))
        with pytest.raises(tg.Failure, match="loss of the first 64") if is_refused else contextlib.nullcontext():
            evaluate.check_mixture(loaded, files)
    monkeypatch.setattr(pointer, "forward", lambda *args: tuple(share + 0.1 for share in forward(*args)))
    with pytest.raises(tg.Failure, match="the loss of the first 64 tokens is"):      # copies in favour of the target
        evaluate.check_mixture(loaded, files)


def test_slices_are_compared_with_train_by_documents_and_grams(tg, tmp_path, call):
    rng = random.Random(0)
    texts = [[rng.randrange(50000) for _ in range(40)] for _ in range(6)]
    train = texts[:3]
    held_out = [texts[0],                                    # the same document
                texts[3][:10] + texts[1][5:18] + texts[3][10:],     # 13 tokens in a row
                texts[4][:10] + texts[1][5:17] + texts[4][10:],     # 12
                texts[2][:5],                                # too short for a gram, and no document of train
                texts[1][33:] + [50256] + texts[2][:6],      # 13 tokens only across two documents
                texts[5]]
    for name, documents in (("train", train), ("held", held_out)):
        put_shard(tmp_path / f"{name}.bin", [token for text in documents for token in [50256, *text]])
    pair = f"--train={tmp_path}/train.bin", f"--slice={tmp_path}/held.bin"
    status, said, errors = call(slices, *pair, f"--out={tmp_path}/clean.bin")
    assert status == 1 and said.splitlines()[0] == (
        "7 documents in the slice: 1 stand in train as they are, 2 are known (13-grams: 29 of 137 in train)"), said
    status, said, errors = call(slices, pair[0], f"--slice={tmp_path}/clean.bin")
    assert status == 0 and said.startswith("5 documents in the slice: 0 stand in train as they are, 0 are known"), said
    assert tg.TokenStream([f"{tmp_path}/clean.bin"], 50257).document_starts(0, 50256)[0] == 0      # marks come first
    for share in ("-0.1", "1.1"):
        status, said, errors = call(slices, *pair, f"--max_share={share}")
        assert status == 2 and f"--max_share={share}: expected 0 to 1" in errors
    status, said, errors = call(slices, *pair, "--max_share=0.03")
    assert status == 1 and "1 are known" in said             # one gram of 41 is not more than 3%
    status, said, errors = call(slices, *pair, f"--out={tmp_path}/clean.bin")
    assert status == 2 and "not overwritten" in errors and len(errors.splitlines()) == 1


def test_slices_read_across_chunks_and_shards(tg, tmp_path, monkeypatch, call):
    tokens = [256, *(random.Random(1).randrange(256) for _ in range(500))]
    for k in range(3):
        put_shard(tmp_path / f"train_{k}.bin", tokens[k * 167:(k + 1) * 167])
    put_shard(tmp_path / "val.bin", [256, 300 % 256, *tokens[100:400]])
    monkeypatch.setattr(slices, "CHUNK_TOKENS", 50)
    train, held_out = (tg.TokenStream(tg.find_shards(f"{tmp_path}/{name}*.bin", "val"), 257)
                       for name in ("train", "val"))
    found = slices.find_overlap(train, held_out, 256, 52)
    assert (found.grams, found.shared_grams, found.known) == (250, 249, [0])
    (tmp_path / "dataset.json").write_text('{"tokenizer": "bytes", "vocab_size": 257, "eod_id": 256}')
    monkeypatch.undo()
    status, said, errors = call(slices, f"--train={tmp_path}/train*.bin", f"--slice={tmp_path}/val.bin")
    assert status == 1 and "(52-grams: 249 of 250 in train)" in said
    put_shard(tmp_path / "twice.bin", [7, 8, 256, 9, 9, 256, 9, 9, 256, 1])
    put_shard(tmp_path / "once.bin", [7, 8, 256, 9, 9])      # text before the first mark, and one document two times
    status, said, errors = call(slices, f"--train={tmp_path}/once.bin", f"--slice={tmp_path}/twice.bin")
    assert status == 1 and said.startswith("4 documents in the slice: 3 stand in train as they are, 3 are known"), said
    put_shard(tmp_path / "gpt2" / "train.bin", [50256, 1, 2, 3])
    with pytest.raises(tg.Refusal, match="tokenizers differ"):
        slices.open_both(f"{tmp_path}/gpt2/train.bin", f"{tmp_path}/val.bin")


# ---- the demo's closing words ----------------------------------------------------------------------------------------


def test_the_bigram_baseline_is_the_smoothed_table_without_document_marks(tg, loaded):
    c = loaded.config
    train, val = (tg.TokenStream(tg.find_shards(files, "any"), 257) for files in (c.train_files, c.val_files))
    tokens = {name: stream.read(0, stream.num_tokens) for name, stream in (("train", train), ("val", val))}
    counts = torch.ones(257, 257, dtype=torch.float64)
    for a, b in zip(tokens["train"][:-1].tolist(), tokens["train"][1:].tolist()):
        counts[a, b] += 1
    logp = (counts / counts.sum(1, keepdim=True)).log()
    pairs = zip(tokens["val"][:c.val_tokens].tolist(), tokens["val"][1:c.val_tokens + 1].tolist())
    found = [float(logp[a, b]) for a, b in pairs if b != 256]
    assert demo.bigram_loss(c, train, val) == pytest.approx(-sum(found) / len(found), rel=1e-6)


def test_the_demo_ends_with_what_its_numbers_mean(tg, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    argv = byte_run(tmp_path, "--checkpoint_every_steps=1000", num_steps=40)
    assert demo.main(argv) == 0
    said = capsys.readouterr().out
    result = json.loads(said[said.index("result:") + 7:].splitlines()[0])
    [(nats, bits), (bigram, _)] = re.findall(r": (\S+) nats/byte, (\S+) bits/byte on held-out text", said)
    assert float(bits) == pytest.approx(float(nats) / math.log(2), abs=2e-4)
    assert abs(float(nats) - result["val_loss"]) < 0.2 and 0 < float(bigram) < 5.6     # without marks, so not the same
    assert "a sample of what it writes:" in said and "tokens/s on this machine" in said
    log = re.search(r"the log is (\S+)", said)[1]
    assert json.loads((tmp_path / log).read_text().rpartition("result:")[2]) == result


def test_without_a_checkpoint_or_bytes_the_demo_ends_as_the_trainer_does(tg, tmp_path, monkeypatch, capsys):
    argv = byte_run(tmp_path, "--checkpoint_every_steps=3", num_steps=3)
    assert demo.main(argv) == 0
    assert "nats/byte" in capsys.readouterr().out
    assert demo.main([*argv[:-1], "--checkpoint_every_steps=0"]) == 0           # the old one is not its own
    assert "nats/byte" not in capsys.readouterr().out
    assert demo.main([*argv, "--nonsense=1"]) == 2
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(tg, "main", lambda argv: 0)
    assert demo.main(argv) == 0 and "nats/byte" not in capsys.readouterr().out
    assert demo.closing_words(checkpoints_in(tmp_path)[-1], 5)
    argv = [word for word in argv if "vocab_size" not in word]
    run_here(0, 1, [*argv, "--vocab_size=300"])
    assert demo.closing_words(checkpoints_in(tmp_path)[-1], 5) == ""


# ---- export ----------------------------------------------------------------------------------------------------------


def test_export_and_the_loading_example(loaded, trained, tmp_path):
    pytest.importorskip("safetensors")
    from records import load_example
    out = tmp_path / "model.safetensors"
    tensors = export.export(trained[0], out)
    model, metadata = load_example.load(out)
    assert metadata["tokenizer"] == "bytes" and metadata["step"] == "100"
    assert (metadata["run_id"], metadata["source_sha256"]) == tuple(
        loaded.facts["run"][key] for key in ("run_id", "source_sha256"))
    for name, p in loaded.model.named_parameters():
        assert (dict(model.named_parameters())[name] == p).all() and tensors[name].shape == p.shape
    text = [256, *b"hello"]
    row = torch.tensor([text + [256] * 10], dtype=torch.int32)
    expected = loaded.model(row, None, loaded.view)[0, 5, :257].softmax(-1)
    assert torch.allclose(load_example.next_probabilities(model, text), expected)
    lines = (ROOT / "records" / "load_example.py").read_text().splitlines()
    assert len(lines) <= 40


def test_the_example_loads_what_an_attempt_made_with_the_attempts_code(trained, tmp_path):
    pytest.importorskip("safetensors")
    export.export(trained[0], tmp_path / "model.safetensors")
    attempt = tmp_path / "attempt.py"
    source = train_gpt_path().read_text()
    section = "    # Machine\n"
    attempt.write_text(source.replace(section, section + '    idea: int = setting(1, "of this attempt")\n'))
    model = tmp_path / "model.safetensors"
    status, said, errors = call_process("load_example.py", model, "hello", TRAIN_GPT=str(attempt))
    assert status == 2 and "differs in idea" in errors and len(errors.splitlines()) == 1, errors
    status, said, errors = call_process("load_example.py", model, "hello", TRAIN_GPT="/no/such.py")
    assert status == 1 and "TRAIN_GPT=/no/such.py: no such file" in errors and len(errors.splitlines()) == 1, errors


def test_the_example_uses_the_models_own_tokenizer(loaded, trained, tmp_path, monkeypatch, call):
    pytest.importorskip("safetensors")
    from safetensors import safe_open

    from records import load_example
    run = loaded.facts["run"]
    for told, kept in (("bytes", "bytes"), (None, "bytes"), ("our-bpe", "our-bpe")):
        changes = {"step": 7, "run": run | {"data": run["data"] | {"tokenizer": told}}}     # of a run that was stopped
        named = loaded._replace(facts=loaded.facts | changes)
        monkeypatch.setattr(checkpoints, "load_model", lambda *args, named=named, **more: named)
        export.export(trained[0], tmp_path / "model.safetensors")
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert [file.metadata()[key] for key in ("tokenizer", "format", "step")] == [kept, "pt", "7"]
    status, said, errors = call(load_example, tmp_path / "model.safetensors", "hello")
    assert status == 2 and "tokenizer 'our-bpe'" in errors and not said and len(errors.splitlines()) == 1, errors


def test_only_the_trainer_opens_checkpoints():
    for path in (ROOT / "records").glob("*.py"):
        code = re.sub(r'(?s)^""".*?"""', "", path.read_text())
        assert not re.search(r"pickle|torch\.load|distributed\.checkpoint", code), path


def test_export_from_the_command_line(trained, tmp_path, call):
    pytest.importorskip("safetensors")
    status, said, errors = call(export, trained[0], tmp_path / "whole.safetensors")
    assert (tmp_path / "whole.safetensors").stat().st_size > 4 * int(said.split()[-2].replace(",", ""))     # float32
    status, said, errors = call(export, trained[0], tmp_path / "half.safetensors", "--dtype=bfloat16")
    assert status == 0 and "tensors" in said, errors
    status, said, errors = call_process("load_example.py", tmp_path / "half.safetensors", "hello")
    assert status == 0 and len(json.loads(said.replace("(", "[").replace(")", "]"))) == 5, errors
    status, said, errors = call_process("load_example.py", tmp_path / "none.safetensors", "hello")
    assert status == 1 and "none.safetensors" in errors and "output" not in errors and errors.count("\n") == 1, errors
    status, said, errors = call_process("load_example.py", tmp_path / "half.safetensors")
    assert status == 1 and errors.startswith("usage: ") and len(errors.splitlines()) == 1, errors
    (tmp_path / "folder").mkdir()
    status, said, errors = call(export, trained[0], tmp_path / "folder")
    assert status == 2 and "folder: can't be written" in errors and not list(tmp_path.glob("*.tmp"))
    status, said, errors = call(export, trained[0], tmp_path / "no" / "such" / "x.safetensors")
    assert status == 2 and "can't be written" in errors and len(errors.splitlines()) == 1, errors


def test_a_checkpoint_of_another_version_is_refused_by_name(tg, trained, monkeypatch):
    facts, whole = tg.read_checkpoint(trained[0])
    facts["run"]["config"]["new_key"] = 1
    monkeypatch.setattr(tg, "read_checkpoint", lambda folder: (facts, whole))
    with pytest.raises(tg.Refusal, match="another version of the trainer .it differs in new_key"):
        checkpoints.load_model(trained[0])
    del facts["run"]["config"]["new_key"]
    whole["embed/weight"] = whole["embed/weight"][:-1]
    with pytest.raises(tg.Refusal, match=r"embed/weight is \(383, 32\), this model wants \(384, 32\)"):
        checkpoints.load_model(trained[0])


def test_a_checkpoint_without_facts_is_refused(tg, trained, monkeypatch):
    facts, whole = tg.read_checkpoint(trained[0])
    for lacking in ("run", "step"):
        monkeypatch.setattr(tg, "read_checkpoint", lambda folder, lacking=lacking: (
            {key: value for key, value in facts.items() if key != lacking}, whole))
        with pytest.raises(tg.Refusal, match=f"checkpoint.json: lacks '{lacking}'"):
            checkpoints.load_model(trained[0])


# ---- demo ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_the_demo_shows_a_bar_on_a_terminal_and_lines_elsewhere(tg, tmp_path, capsys, terminal):
    from records import demo
    bar, log = demo.Bar(terminal), tg.RunLog(str(tmp_path), tg.World())
    lines = ["note: begins", "step:10/40 train_loss:2.5000 train_time:1ms", "step:20/40 val_loss:2.4000 train_time:2ms",
             "step:20/40 train_loss:2.3000 train_time:3ms"]
    for line in lines:
        bar.event(log, line)
    bar.bar.close()
    log.close()
    out, err = capsys.readouterr()
    assert log.path is not None and (tmp_path / log.path.name).read_text().splitlines() == lines
    if terminal:
        assert out.splitlines() == [lines[0], lines[2]] and "20/40" in err and "loss 2.3000" in err
    else:
        assert out.splitlines() == lines and err == ""


@pytest.mark.parametrize("console", ["full", "gone"])
def test_the_demo_trains_on_when_nobody_can_see_it(tmp_path, console):
    argv = byte_run(tmp_path, "--checkpoint_every_steps=100", num_steps=100)
    ours, theirs = pty.openpty() if console == "gone" else (None, os.open("/dev/full", os.O_WRONLY))
    process = subprocess.Popen([sys.executable, str(ROOT / "records" / "demo.py"), *argv], stdout=theirs, stderr=theirs)
    os.close(theirs)
    if ours is not None:
        while b"step:" not in os.read(ours, 10000):
            pass
        os.close(ours)
    assert process.wait(timeout=120) == 0
    [log] = (tmp_path / "logs").glob("*.txt")
    assert '"status": "finished"' in log.read_text() and checkpoints_in(tmp_path)


def test_other_ranks_show_nothing(tg, tmp_path, capsys):
    from records import demo
    demo.Bar(True).event(tg.RunLog(str(tmp_path), tg.World(1, 2)), "note: begins")
    assert capsys.readouterr().out == ""
