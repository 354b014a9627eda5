"""Room 1: defaults are record 20, presets are legal, and every option that can't be used gets one readable line."""
import dataclasses
import math

import pytest


def refusal(tg, *argv):
    with pytest.raises(tg.Refusal) as caught:
        tg.parse_config(list(argv))
    text = str(caught.value)
    assert text and "\n" not in text
    return text


FIXED_KEYS = ("preset, train_files, val_files, val_tokens, batch_tokens, row_tokens, micro_rows, num_steps, "
              "val_every_steps, target_loss, seed, compile, attention, log_dir, profile_steps").split(", ")


def test_the_promised_keys_and_presets_are_there(tg):
    assert set(FIXED_KEYS) <= {f.name for f in dataclasses.fields(tg.Config)}
    assert {"record", "sprint", "demo", "tiny"} <= set(tg.PRESETS)


def test_defaults_are_record_20_in_numbers(tg):
    c = tg.Config()
    assert (c.num_layers, c.model_dim, c.num_heads, c.head_dim, c.mlp_dim) == (12, 768, 6, 128, 3072)
    assert (c.batch_tokens, c.num_steps, c.val_tokens, c.val_row_tokens) == (524_288, 1393, 10_485_760, 65_536)
    assert (c.lr_matrix, c.lr_embed, c.lr_head, c.lr_scalar) == (0.05, 0.6, 0.008, 0.04)
    assert (c.adam_beta1, c.adam_beta2, c.adam_eps) == (0.8, 0.95, 1e-10)
    assert (c.momentum_start, c.momentum_end, c.momentum_warmup_steps) == (0.85, 0.95, 300)
    assert (c.cooldown_frac, c.lr_floor, c.softcap, c.attention_scale) == (0.4, 0.1, 15.0, 0.12)
    assert (c.window_tokens, c.block_tokens, c.rotary_base, c.target_loss) == (1792, 128, 1024.0, 3.28)


def test_the_vocabulary_is_padded_to_a_multiple_of_128(tg):
    assert tg.Config().padded_vocab == 50_304
    assert tg.Config(vocab_size=128).padded_vocab == 128
    assert tg.Config(vocab_size=129).padded_vocab == 256


def test_every_preset_is_legal_and_keeps_its_name(tg):
    for name in tg.PRESETS:
        config, overrides = tg.parse_config([f"--preset={name}"])
        assert config.preset == name and overrides == {}
        assert config.batch_rows * config.row_tokens == config.batch_tokens


def test_the_default_preset_is_the_callers_choice(tg):
    assert tg.parse_config([])[0] == tg.Config()
    assert tg.parse_config([], "demo")[0].preset == "demo"
    assert tg.parse_config(["--preset=tiny"], "demo")[0].preset == "tiny"


def test_overrides_take_the_type_of_their_field(tg):
    config, overrides = tg.parse_config(["--preset=tiny", "--num_steps=7", "--lr_matrix=1e-3", "--long_layers=0,1",
                                         "--train_files=a=b,*.bin", "--compile=true", "--fp8=0", "--deterministic",
                                         "--micro_rows=auto", "--no_attention_layers="])
    assert overrides == dict(num_steps=7, lr_matrix=1e-3, long_layers=(0, 1), train_files="a=b,*.bin", compile="on",
                             fp8="off", deterministic="on", micro_rows=0, no_attention_layers=())
    assert {key: getattr(config, key) for key in overrides} == overrides
    assert config.model_dim == tg.PRESETS["tiny"]["model_dim"]


def test_config_is_frozen(tg):
    with pytest.raises(dataclasses.FrozenInstanceError):
        tg.Config().num_steps = 3


@pytest.mark.parametrize("argv, parts", [
    (["--nonsense=1"], ["--nonsense", "no such key"]),
    (["--num_step=1"], ["no such key", "num_steps"]),
    (["--num-step=1"], ["--num_step", "no such key", "num_steps"]),
    (["--=1"], ["no such key"]),
    (["num_steps=1"], ["num_steps=1", "--key=value"]),
    (["--num_steps", "5"], ["--num_steps", "--key=value"]),
    (["--num_steps=2.5"], ["--num_steps=2.5", "a whole number"]),
    (["--num_steps="], ["--num_steps=", "a whole number"]),
    (["--lr_matrix=fast"], ["--lr_matrix=fast", "a number"]),
    (["--long_layers=0,x"], ["--long_layers=0,x", "0,4,11"]),
    (["--compile=maybe"], ["--compile=maybe", "auto, on, off"]),
    (["--attention=flash"], ["--attention=flash", "flex"]),
    (["--preset=fast"], ["--preset=fast", "sprint"]),
    (["--seed=1", "--seed=1"], ["--seed", "twice"]),
    (["--num_steps=0"], ["--num_steps=0", "from 1"]),
    (["--val_tokens=-1"], ["--val_tokens=-1", "from 0"]),
    (["--lr_head=nan"], ["--lr_head=nan", "finite"]),
    (["--lr_head=inf"], ["--lr_head=inf", "finite"]),
    (["--batch_tokens=100000"], ["--batch_tokens=100000", "row_tokens=16384"]),
    (["--preset=tiny", "--row_tokens=100", "--batch_tokens=1000"], ["--row_tokens=100", "block_tokens=16"]),
    (["--window_tokens=100"], ["--window_tokens=100", "block_tokens=128"]),
    (["--window_tokens=0"], ["--window_tokens=0"]),
    (["--val_row_tokens=1000"], ["--val_row_tokens=1000", "block_tokens=128"]),
    (["--head_dim=6"], ["--head_dim=6", "4"]),
    (["--eod_id=50257"], ["--eod_id=50257", "50257"]),
    (["--vocab_size=65537"], ["--vocab_size=65537", "65536"]),
    (["--num_value_tables=7"], ["--num_value_tables=7", "6"]),
    (["--long_layers=12"], ["--long_layers", "11"]),
    (["--no_attention_layers=-1"], ["--no_attention_layers", "11"]),
    (["--adam_beta1=1"], ["--adam_beta1", "to 0.999999"]),
    (["--momentum_end=1"], ["--momentum_end", "to 0.999999"]),
    (["--cooldown_frac=1.5"], ["--cooldown_frac=1.5", "from 0 to 1"]),
    (["--softcap=0"], ["--softcap=0"]),
    (["--rotary_base=0"], ["--rotary_base=0"]),
    (["--seed=99999999999999999999"], ["--seed=9999", "to 9223372036854775807"]),
    (["--num_steps=1" + "0" * 400], ["--num_steps=1000", "to 1000000"]),
    (["--lr_matrix=1e38"], ["--lr_matrix=1e+38", "to 9223372036854775807"]),
    # What the campaign of tests/test_fuzz.py found: tracebacks, endless loops and unreadable messages.
    (["--num_steps=1000001"], ["--num_steps=1000001", "1000000"]),                      # schedules are loops over steps
    (["--num_layers=1000000000"], ["--num_layers=1000000000", "1000"]),
    (["--model_dim=1000000"], ["--model_dim=1000000", "parameters", "10,000,000,000"]),
    (["--ngram_rows=8192,2147483648"], ["ngram_rows", "parameters"]),
    (["--ngram_rows=8192,0"], ["--ngram_rows=(8192, 0)", "from 1"]),
    (["--ngram_rows=-1"], ["--ngram_rows=(-1,)", "from 1"]),
    (["--preset=tiny", "--row_tokens=4", "--block_tokens=4", "--ngram_rows=9,9,9,9,9"], ["--ngram_rows", "row_tokens"]),
    (["--window_tokens=1099511627776"], ["--window_tokens=1099511627776", "16777216"]),      # counted in int32
    (["--batch_tokens=1125899906842624"], ["--batch_tokens=1125899906842624", "67108864"]),
    (["--preset=tiny", "--val_row_tokens=1", "--block_tokens=1"], ["--val_row_tokens=1", "from 4"]),
    (["--preset=tiny", "--num_layers=1"], ["--num_value_tables=1", "num_layers/2 = 0"]),
    (["--num_layers=4"], ["--long_layers=(0, 4, 11)", "num_layers - 1 = 3"]),
    (["--vocab_size=100"], ["--eod_id=50256", "vocab_size - 1 = 99"]),
    (["--seed=1\n2"], ["--seed=1\\n2", "printable"]),
    (["--train_files=\x1b[31m*.bin"], ["--train_files=\\x1b", "printable"]),
    (["--log_dir=\udc80"], ["--log_dir=\\udc80", "printable"]),
])
def test_what_cannot_be_used_is_refused_in_one_line_that_names_it(tg, argv, parts):
    text = refusal(tg, *argv)
    for part in parts:
        assert part in text, text


def test_a_long_value_is_shown_in_part(tg):
    for option in ("--num_steps=" + "9" * 5000, "--seed=" + "9" * 4000, "--compile=" + "x" * 5000, "--" + "x" * 5000,
                   "--" + "x" * 5000 + "=1", "--long_layers=" + "99," * 2000):
        assert len(refusal(tg, option)) < 300


def test_each_option_is_a_field_and_help_shows_its_default(tg):
    text = tg.help_text()
    for field in dataclasses.fields(tg.Config):
        assert f"--{field.name}={getattr(tg.Config(), field.name)}" in text
    for preset in tg.PRESETS:
        assert preset in text


def test_every_number_of_the_defaults_is_finite(tg):
    for name in tg.PRESETS:
        config = tg.parse_config([f"--preset={name}"])[0]
        numbers = [v for v in dataclasses.asdict(config).values() if isinstance(v, (int, float))]
        assert all(math.isfinite(n) for n in numbers) and len(numbers) > 30


def test_hyphens_in_keys_are_underscores(tg):
    assert tg.parse_config(["--preset=tiny", "--num-steps=7"])[1] == {"num_steps": 7}
