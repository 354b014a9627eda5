"""Using a trained model: sample.py, evaluate.py, export.py, load_example.py on a checkpoint of a small run."""
import json
import math
import re
import subprocess
import sys
import time

import pytest
import torch
from rank_helpers import ROOT
from run_helpers import byte_run, checkpoints_in, run_here

from records import checkpoints, demo, evaluate, export, sample

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


def call_process(tool, *args):
    """Run a tool as users do, from another folder; -> (status, output, errors)."""
    done = subprocess.run([sys.executable, str(ROOT / "records" / tool), *map(str, args)], text=True, timeout=120,
                          capture_output=True, cwd="/")
    return done.returncode, done.stdout, done.stderr


def test_a_model_without_value_embeddings_can_be_used(tmp_path):
    run_here(0, 1, byte_run(tmp_path, "--checkpoint_every_steps=3", "--value_layers=", num_steps=3))
    assert checkpoints.load_model(checkpoints_in(tmp_path)[-1], device="cpu").config.value_layers == ()


# ---- sample ----------------------------------------------------------------------------------------------------------


def test_a_seed_gives_a_text_and_another_seed_another(loaded):
    texts = [sample.sample(loaded, "hello ", 30, 0.9, 50, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("hello ") for text in texts)


def test_temperature_zero_takes_the_likeliest(loaded):
    assert sample.sample(loaded, "ab", 10, 0.0, 50, 1) == sample.sample(loaded, "ab", 10, 0.7, 1, 2)


def test_padding_ids_are_never_drawn(tg, loaded):
    with torch.no_grad():
        loaded.model.embed[257:] = loaded.model.embed[97] * 100        # the padding looks likely
    tokens = sample.generate(loaded, [256, 97], 200, seed=0, temperature=5.0, top_k=10 ** 6)
    assert max(tokens) <= 256 and len(tokens) == 202


def test_a_text_reads_the_logits_of_its_last_token(loaded):
    text = sample.generate(loaded, [256, 97], 70, temperature=0.0)                 # past the length of a row
    assert len(text) == 72
    for n in (2, 3, 17, 71):
        context = text[max(0, n - 64):n]
        row = torch.tensor([context + [7] * (-len(context) % 16)], dtype=torch.int32)     # what follows doesn't matter
        assert text[n] == int(loaded.model(row, None, loaded.view)[0, len(context) - 1, :257].argmax())


def test_256_tokens_of_the_demo_model_take_seconds(tg):
    config = tg.parse_config(["--preset=demo"])[0]
    loaded = checkpoints.Loaded(config, tg.GPT(config).eval(), {"step": config.num_steps})
    began = time.perf_counter()
    sample.generate(loaded, [256], 256)
    assert time.perf_counter() - began < 15


def test_sample_from_the_command_line(trained, call):
    status, said, errors = call_process("sample.py", trained[0], "hello", "--tokens=20", "--seed=3")
    assert status == 0 and said.startswith("hello") and not errors, errors
    status, said, errors = call(sample, trained[0].parent, "hello")
    assert status == 2 and "checkpoint.json: can't be read" in errors and len(errors.splitlines()) == 1, errors


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
    tokens = torch.empty(stream.num_tokens, dtype=torch.int32)
    stream.read(0, stream.num_tokens, tokens)
    size = int((tokens[1:] < 256).sum())
    assert size < found["targets"]
    assert math.isclose(found["bits_per_byte"], found["loss"] * found["targets"] / math.log(2) / size)


def test_multiple_choice(tg, loaded, tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(map(json.dumps, ITEMS)))
    items = evaluate.read_items(path)
    found = evaluate.choose(loaded, items)
    assert found == dict(items=3, acc=1.0, acc_norm=1.0)     # letters against signs that no shard holds
    wrong = [dict(item, label=(item["label"] + 1) % 3) for item in items]
    assert evaluate.choose(loaded, wrong)["acc"] == 0


def test_the_score_of_an_ending_is_the_sum_over_its_tokens(tg, loaded):
    context, ending = [256, *b"hello "], list(b"wor")
    by_hand = 0.0
    for i, token in enumerate(ending):
        tokens = context + ending[:i]
        row = torch.tensor([tokens + [256] * (-len(tokens) % 16)], dtype=torch.int32)
        by_hand += loaded.model(row, None, loaded.view)[0, len(tokens) - 1].log_softmax(-1)[token].item()
    assert abs(evaluate.log_probability(loaded, context, ending) - by_hand) < 1e-4


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"ctx": "a", "endings": ["b"], "label": 1}', "no json",
                                  '{"ctx": "a", "endings": ["", "c"], "label": 1}'])
def test_bad_items_are_refused_by_line(tg, tmp_path, text):
    path = tmp_path / "items.jsonl"
    path.write_text(text)
    with pytest.raises(tg.Refusal, match="line 1 is not|no items"):
        evaluate.read_items(path)


def test_evaluate_from_the_command_line(trained, tmp_path, call):
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(map(json.dumps, ITEMS)))
    status, said, errors = call(evaluate, trained[0], f"--choices={path}", f"--files={ROOT}/no/such/*.bin")
    assert status == 2 and "acc 1.0000" in said and "no val shards match" in errors, (said, errors)
    status, said, errors = call(evaluate, trained[0], "--row_tokens=16")
    assert status == 2 and "smaller than a row" in errors
    status, said, errors = call(evaluate, trained[0], "--row_tokens=32", "--overlap=0")
    assert status == 0 and "nats per token over" in said and "bits per byte" in said, errors


# ---- the demo's closing words ----------------------------------------------------------------------------------------


def test_the_bigram_baseline_is_the_smoothed_table_without_document_marks(tg, loaded):
    c = loaded.config
    train, val = (tg.TokenStream(tg.find_shards(files, "any"), 257) for files in (c.train_files, c.val_files))
    tokens = {}
    for name, stream in (("train", train), ("val", val)):
        tokens[name] = torch.empty(stream.num_tokens, dtype=torch.int32)
        stream.read(0, stream.num_tokens, tokens[name])
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
    for name, p in loaded.model.named_parameters():
        assert (dict(model.named_parameters())[name] == p).all() and tensors[name].shape == p.shape
    text = [256, *b"hello"]
    row = torch.tensor([text + [256] * 10], dtype=torch.int32)
    expected = loaded.model(row, None, loaded.view)[0, 5, :257].softmax(-1)
    assert torch.allclose(load_example.next_probabilities(model, text), expected)
    lines = (ROOT / "records" / "load_example.py").read_text().splitlines()
    assert len(lines) <= 40


def test_export_from_the_command_line(trained, tmp_path, call):
    pytest.importorskip("safetensors")
    status, said, errors = call(export, trained[0], tmp_path / "half.safetensors", "--dtype=bfloat16")
    assert status == 0 and "tensors" in said, errors
    status, said, errors = call_process("load_example.py", tmp_path / "half.safetensors", "hello")
    assert status == 0 and len(json.loads(said.replace("(", "[").replace(")", "]"))) == 5, errors
    status, said, errors = call_process("load_example.py", tmp_path / "half.safetensors")
    assert status == 1 and errors.startswith("usage: ") and len(errors.splitlines()) == 1, errors
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


def test_other_ranks_show_nothing(tg, tmp_path, capsys):
    from records import demo
    demo.Bar(True).event(tg.RunLog(str(tmp_path), tg.World(1, 2)), "note: begins")
    assert capsys.readouterr().out == ""
