"""Room 1: defaults are the record, presets are legal, and every option that can't be used gets one readable line."""
import dataclasses
import math
import re

import pytest
from model_helpers import SMALL


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


@pytest.mark.recipe
def test_defaults_are_the_record_in_numbers(tg):
    c = tg.Config()
    assert (c.num_layers, c.model_dim, c.num_heads, c.head_dim, c.qk_dim, c.mlp_dim) == (11, 768, 6, 128, 128, 3072)
    assert (c.batch_tokens, c.num_steps, c.val_tokens, c.val_overlap) == (262_144, 2500, 10_485_760, 2048)
    assert (c.lr_matrix, c.lr_embed, c.lr_value, c.lr_scalar, c.lr_table) == (0.031, 0.008, 0.6, 0.04, 0.85)
    assert (c.cooldown_frac, c.lr_floor, c.ema_frac, c.ema_blend) == (0.8, 0.3, 0.25, 0.7)
    assert (c.softcap, c.attention_scale, c.block_tokens, c.target_loss) == ((23.0, 5.0, 7.5), 0.1, 128, 3.28)
    assert (c.table_rows, c.table_orders, c.val_window_blocks) == (4_194_301, (2, 3), 20)


@pytest.mark.recipe
def test_the_sprint_is_the_record_on_one_gpu(tg):
    c = tg.parse_config(["--preset=sprint"])[0]
    assert (c.num_steps, c.batch_tokens, c.target_loss, c.val_tokens) == (1230, 65_536, 3.48, 2_097_152)
    assert (c.stages, c.num_layers, c.num_heads) == ("sprint", 4, 4)


@pytest.mark.recipe
def test_small_and_mile_are_the_sprint_with_less_memory_and_longer(tg):
    sprint, small, mile = (dataclasses.asdict(tg.parse_config([f"--preset={name}"])[0])
                           for name in ("sprint", "small", "mile"))
    assert {key: small[key] for key in small if small[key] != sprint[key]} == dict(
        preset="small", num_steps=1330, row_tokens=16_384, micro_rows=1, num_layers=5, long_layers=(1, 4),
        value_layers=(4,), table_rows=1_048_573)
    assert {key: mile[key] for key in mile if mile[key] != sprint[key]} == dict(
        preset="mile", num_steps=2670, val_tokens=4_194_304, target_loss=0.0, num_layers=9,
        long_layers=(3, 8), no_attention_layers=(4, 6), value_layers=(1, 7, 8), ema_blend=0.7, lr_matrix=0.0146,
        lr_embed=0.0043, lr_value=0.318)


def test_the_vocabulary_is_padded_to_a_multiple_of_128(tg):
    assert tg.Config(vocab_size=50_257).padded_vocab == 50_304
    assert tg.Config(vocab_size=128).padded_vocab == 128
    assert tg.Config(vocab_size=129).padded_vocab == 256


def test_every_preset_is_legal_and_keeps_its_name(tg):
    for name in tg.PRESETS:
        config, overrides = tg.parse_config([f"--preset={name}"])
        assert config.preset == name and overrides == {}
        assert config.batch_tokens % config.row_tokens == 0


def test_the_default_preset_is_the_callers_choice(tg):
    assert tg.parse_config([])[0] == tg.Config()
    assert tg.parse_config([], "demo")[0].preset == "demo"
    assert tg.parse_config(["--preset=tiny"], "demo")[0].preset == "tiny"


def test_overrides_take_the_type_of_their_field(tg):
    config, overrides = tg.parse_config(["--preset=tiny", "--num_steps=7", "--lr_matrix=1e-3", "--long_layers=0,2",
                                         "--train_files=a=b,*.bin", "--compile=on", "--fp8=off", "--deterministic",
                                         "--micro_rows=2", "--value_layers=", "--softcap=30,0,7.5",
                                         "--stages=sprint"])
    assert overrides == dict(num_steps=7, lr_matrix=1e-3, long_layers=(0, 2), train_files="a=b,*.bin", compile="on",
                             fp8="off", deterministic="on", micro_rows=2, value_layers=(), softcap=(30, 0, 7.5),
                             stages="sprint")
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
    (["--preset=tiny", "--preset=demo"], ["--preset", "twice"]),
    (["--NUM_STEPS=1"], ["--NUM_STEPS", "no such key"]),
    (["--num_steps=0"], ["--num_steps=0", "from 1"]),
    (["--val_tokens=-1"], ["--val_tokens=-1", "from 0"]),
    (["--lr_matrix=nan"], ["--lr_matrix=nan", "finite"]),
    (["--lr_matrix=inf"], ["--lr_matrix=inf", "finite"]),
    (["--batch_tokens=100000", "--row_tokens=16384"], ["--batch_tokens=100000", "row_tokens=16384"]),
    (["--preset=tiny", "--row_tokens=100", "--batch_tokens=1000"], ["--row_tokens=100", "block_tokens=16"]),
    (["--val_overlap=1000", "--block_tokens=128"], ["--val_overlap=1000", "block_tokens=128"]),
    (["--val_overlap=16384", "--row_tokens=16384"], ["--val_overlap=16384", "row_tokens - 1 = 16383"]),
    (["--val_window_blocks=0"], ["--val_window_blocks=0", "from 1"]),
    (["--qk_dim=10"], ["--qk_dim=10", "multiple of 4"]),
    (["--eod_id=50257"], ["--eod_id=50257", "50257"]),
    (["--vocab_size=65537"], ["--vocab_size=65537", "65536"]),
    (["--long_layers=11", "--num_layers=11"], ["--long_layers", "num_layers - 1 = 10"]),
    (["--value_layers=-1"], ["--value_layers", "from 0"]),
    (["--value_layers=1,11", "--num_layers=11"], ["--value_layers", "num_layers - 1 = 10"]),
    (["--no_attention_layers=11", "--num_layers=11"], ["--no_attention_layers", "num_layers - 1 = 10"]),
    (["--no_attention_layers=1,4", "--long_layers=4"], ["--long_layers=(4,)", "none of no_attention_layers"]),
    (["--preset=tiny", "--no_attention_layers=2", "--value_layers=1,2"],
     ["--value_layers=(1, 2)", "none of no_attention_layers"]),
    (["--copy_dim=0"], ["--copy_dim=0", "from 8"]),
    (["--table_orders=2,5"], ["--table_orders=(2, 5)", "from 1 to 4"]),
    (["--table_orders="], ["--table_orders=()", "at least one"]),
    (["--stages=none"], ["--stages=none", "one of record, sprint"]),
    (["--softcap=23,5"], ["--softcap=(23.0, 5.0)", "cap, shift, width"]),
    (["--softcap=23,5,0"], ["--softcap=(23.0, 5.0, 0.0)", "more than 0"]),
    (["--softcap=400,5,7.5"], ["--softcap=(400.0,", "at most 80"]),                       # fp32's exp would underflow
    (["--table_orders=2.5"], ["--table_orders=2.5", "numbers with commas"]),
    (["--long_layers=0.5"], ["--long_layers=0.5", "numbers with commas"]),
    (["--model_dim=40"], ["--model_dim=40", "multiple of 16"]),
    (["--cooldown_frac=1.5"], ["--cooldown_frac=1.5", "from 0 to 1"]),
    (["--ema_blend=1.5"], ["--ema_blend=1.5", "from 0 to 1"]),
    (["--seed=99999999999999999999"], ["--seed=9999", "to 9223372036854775807"]),
    (["--num_steps=1" + "0" * 400], ["--num_steps=1000", "to 999999"]),
    (["--lr_matrix=1e38"], ["--lr_matrix=1e+38", "to 9223372036854775807"]),
    # What the campaign of tests/test_fuzz.py found: tracebacks, endless loops and unreadable messages.
    (["--num_steps=1000001"], ["--num_steps=1000001", "999999"]),                      # schedules are loops over steps
    (["--num_layers=1000000000"], ["--num_layers=1000000000", "1000"]),
    (["--preset=tiny", "--row_tokens=4", "--batch_tokens=4", "--val_overlap=0", "--block_tokens=4"],
     ["--row_tokens=4", "from 8"]),
    (["--batch_tokens=1125899906842624"], ["--batch_tokens=1125899906842624", "67108864"]),
    (["--num_layers=3", "--long_layers=1,3"], ["--long_layers=(1, 3)", "num_layers - 1 = 2"]),
    (["--vocab_size=100", "--eod_id=50256"], ["--eod_id=50256", "vocab_size - 1 = 99"]),
    (["--seed=1\n2"], ["--seed=1\\n2", "printable"]),
    (["--train_files=\x1b[31m*.bin"], ["--train_files=\\x1b", "printable"]),
    (["--log_dir=\udc80"], ["--log_dir=\\udc80", "printable"]),
    (["--softcap=23,5,7.5,1"], ["--softcap=(23.0, 5.0, 7.5, 1.0)", "three numbers"]),
    (["--block_tokens=8", "--row_tokens=24", "--batch_tokens=240", "--val_overlap=0"], ["--row_tokens=24", "of 16"]),
])
def test_what_cannot_be_used_is_refused_in_one_line_that_names_it(tg, argv, parts):
    text = refusal(tg, *argv)
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize("lowest, keys", [
    (0, "eod_id micro_rows val_tokens val_overlap val_every_steps target_loss attention_scale lr_matrix lr_embed "
        "lr_value lr_scalar lr_table cooldown_frac lr_floor ema_frac ema_blend seed profile_steps "
        "checkpoint_every_steps long_layers no_attention_layers value_layers softcap"),
    (1, "max_epochs vocab_size num_steps batch_tokens val_window_blocks num_layers num_heads mlp_dim table_rows "
        "table_orders block_tokens log_every_steps"),
    (8, "row_tokens head_dim qk_dim copy_dim"), (16, "model_dim")])
def test_the_lowest_value_of_each_number_is_known(tg, lowest, keys):
    for key in keys.split():
        try:
            tg.parse_config([f"--{key}={lowest}"])
        except tg.Refusal as error:                 # for what it means beside other settings, not by itself
            assert f"--{key}={lowest}: expected a finite" not in str(error), error
        assert f"--{key}=" in (text := refusal(tg, f"--{key}={lowest - 1}")) and f"from {lowest} to" in text, text


@pytest.mark.parametrize("softcap, legal", [
    ("80,0,7.5", True), ("80.5,0,7.5", False), ("16,0,1", True), ("16.5,0,1", False), ("0.1,0,1", True),
    ("0,0,1", False)])
def test_a_cap_is_above_0_and_at_most_80_and_16_widths(tg, softcap, legal):
    if legal:
        tg.parse_config([f"--softcap={softcap}"])
    else:
        assert "at most 80 and at most 16 widths" in refusal(tg, f"--softcap={softcap}")


@pytest.mark.parametrize("changes, fits", [
    ({}, True), (dict(block_tokens=256), True), (dict(block_tokens=64), False), (dict(block_tokens=192), False),
    *((dict([(key, width)]), width >= 16) for key in ("head_dim", "qk_dim", "copy_dim") for width in (12, 16))])
def test_flexattention_takes_blocks_of_128_and_heads_from_16_on(tg, changes, fits):
    assert dataclasses.replace(tg.Config(), **changes).fits_flex is fits


def test_a_long_value_is_shown_in_part(tg):
    for option in ("--num_steps=" + "9" * 5000, "--seed=" + "9" * 4000, "--compile=" + "x" * 5000, "--" + "x" * 5000,
                   "--" + "x" * 5000 + "=1", "--long_layers=" + "99," * 2000):
        assert len(refusal(tg, option)) < 300


def test_each_option_is_a_field_and_help_shows_its_default(tg):
    """As one types it: the shown options, given together, are the record. Each has a meaning, each section a head."""
    text = tg.help_text()
    shown = re.findall(r"^    (--(\w+)=\S*) +\S.{4,}$", text, re.M)
    assert [key for _, key in shown] == [f.name for f in dataclasses.fields(tg.Config)]
    assert tg.parse_config([option for option, _ in shown])[0] == tg.Config()
    assert "NorMuon, hidden matrices" in text and "(auto | flex | dense)" in text
    assert set(tg.SECTIONS) <= {key for _, key in shown}
    assert all(f"\n  {head}\n" in text for head in tg.SECTIONS.values())
    assert ", ".join(tg.PRESETS) in text


def test_the_names_of_stages_are_those_of_the_tables(tg):
    """Room 1 can't look into room 7."""
    assert set(tg.CHOICES["stages"]) == set(tg.STAGES)
    assert {tg.parse_config([f"--preset={name}"])[0].stages for name in tg.PRESETS} <= set(tg.STAGES)


def test_every_choice_and_every_key_that_resume_may_change_is_a_setting(tg):
    keys = {f.name for f in dataclasses.fields(tg.Config)}
    assert set(tg.CHOICES) <= keys and tg.RESUME_MAY_CHANGE <= keys


@pytest.mark.recipe
def test_a_resumed_run_may_not_change_what_decides_the_curve(tg):
    assert {f.name for f in dataclasses.fields(tg.Config)} - tg.RESUME_MAY_CHANGE == set("""
        vocab_size eod_id num_steps batch_tokens stages row_tokens model_dim num_layers num_heads head_dim qk_dim
        mlp_dim long_layers no_attention_layers value_layers copy_dim table_rows table_orders block_tokens
        attention_scale softcap lr_matrix lr_embed lr_value lr_scalar lr_table cooldown_frac lr_floor ema_frac
        ema_blend seed""".split())


@pytest.mark.parametrize("changes", [{}, dict(value_layers=(0, 1, 2)), dict(table_orders=(2, 3, 4)), dict(qk_dim=16),
                                     dict(no_attention_layers=()), dict(no_attention_layers=(0, 3, 3)),
                                     dict(mlp_dim=512, num_layers=2, long_layers=(1,), no_attention_layers=(),
                                          value_layers=()), dict(vocab_size=1025, table_rows=1)])
def test_the_number_of_parameters_is_that_of_the_model(tg, changes):
    c = tg.Config(**{**SMALL, "model_dim": 64, "head_dim": 32, "table_rows": 10_007, **changes})
    built = sum(p.numel() for p in tg.GPT(c).parameters())
    assert 0 <= built - tg.num_parameters(c) < 0.02 * built


def test_a_layer_that_is_named_twice_is_counted_once(tg):
    once, twice = (tg.Config(**{**SMALL, "no_attention_layers": layers}) for layers in ((0, 3), (0, 3, 3)))
    assert tg.num_parameters(once) == tg.num_parameters(twice)


def test_every_number_of_the_defaults_is_finite(tg):
    for name in tg.PRESETS:
        config = tg.parse_config([f"--preset={name}"])[0]
        numbers = [v for v in dataclasses.asdict(config).values() if isinstance(v, (int, float))]
        assert all(math.isfinite(n) for n in numbers) and len(numbers) > 30


def test_hyphens_in_keys_are_underscores(tg):
    assert tg.parse_config(["--preset=tiny", "--num-steps=7"])[1] == {"num_steps": 7}


def test_auto_is_a_number_of_rows_and_of_no_other_key(tg):
    config, overrides = tg.parse_config(["--micro_rows=auto"])
    assert config.micro_rows == 0 and overrides == {"micro_rows": 0}
    assert "a whole number" in refusal(tg, "--num_steps=auto")
