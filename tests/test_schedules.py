"""Room 7: step -> rate, momentum, window, rows; values at the borders."""
import pytest
from model_helpers import replaced


def test_the_rate_is_flat_and_then_falls_linearly_to_a_tenth(tg):
    c = tg.Config(num_steps=1000)
    assert tg.lr_scale_at(c, 0) == tg.lr_scale_at(c, 300) == 1.0
    assert tg.lr_scale_at(c, 600) == pytest.approx(1.0)
    assert tg.lr_scale_at(c, 601) < 1.0
    assert tg.lr_scale_at(c, 800) == pytest.approx(0.5 + 0.5 * 0.1)
    assert tg.lr_scale_at(c, 900) == pytest.approx(0.25 + 0.75 * 0.1)
    assert tg.lr_scale_at(c, 1000) == pytest.approx(0.1)
    steps = [tg.lr_scale_at(c, s) - tg.lr_scale_at(c, s + 1) for s in range(600, 1000)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-6)


def test_without_a_cooldown_the_rate_stays(tg):
    c = tg.Config(num_steps=10, cooldown_frac=0.0)
    assert [tg.lr_scale_at(c, s) for s in range(11)] == [1.0] * 11


def test_a_cooldown_over_the_whole_run_begins_at_step_0(tg):
    c = tg.Config(num_steps=10, cooldown_frac=1.0, lr_floor=0.0)
    assert [tg.lr_scale_at(c, s) for s in range(11)] == pytest.approx([1 - s / 10 for s in range(11)])


def test_momentum_warms_up_from_085_to_095_over_300_steps(tg):
    c = tg.Config()
    assert tg.momentum_at(c, 0) == 0.85
    assert tg.momentum_at(c, 150) == pytest.approx(0.90)
    assert tg.momentum_at(c, 300) == tg.momentum_at(c, 1392) == pytest.approx(0.95)
    assert tg.momentum_at(replaced(c, momentum_warmup_steps=0), 0) == pytest.approx(0.95)


def test_the_window_grows_block_by_block_from_128_to_1792_tokens(tg):
    c = tg.Config()
    windows = [tg.window_blocks_at(c, s) for s in range(c.num_steps + 1)]
    assert windows[0] == 1 and windows[-1] == windows[-2] == 14
    assert {b - a for a, b in zip(windows, windows[1:])} == {0, 1}
    assert set(windows) == set(range(1, 15))
    held = [windows[:-1].count(n) for n in range(1, 15)]
    assert max(held) - min(held) <= 2          # at an even pace


def test_validation_after_the_last_step_sees_the_whole_window(tg):
    for name in tg.PRESETS:
        c = tg.parse_config([f"--preset={name}"])[0]
        assert tg.window_blocks_at(c, c.num_steps) == c.window_tokens // c.block_tokens


def test_every_step_has_its_stage_and_batch(tg, monkeypatch):
    stages = (tg.Stage(0.25, batch=0.5, max_doc_tokens=32, window=(0.0, 0.5), lr=2.0),
              tg.Stage(0.75, window=(0.5, 1.0)), tg.Stage(1.0, batch=1.5, window=(1.0, 1.0), lr=0.5))
    monkeypatch.setitem(tg.STAGES, "three", stages)
    c = tg.Config(stages="three", num_steps=80, cooldown_frac=0.0)
    assert [tg.stage_at(c, s)[0] for s in (0, 19, 20, 59, 60, 79, 80)] == [stages[i] for i in (0, 0, 1, 1, 2, 2, 2)]
    assert [tg.stage_at(c, s)[1] for s in (0, 10, 20, 40, 60, 70, 80)] == pytest.approx([0, .5, 0, .5, 0, .5, 1.0])
    assert [tg.rows_at(c, s) for s in (0, 19, 20, 60)] == [16, 16, 32, 48]
    assert [tg.lr_scale_at(c, s) for s in (0, 20, 60)] == [2.0, 1.0, 0.5]
    assert [tg.window_blocks_at(c, s) for s in (0, 10, 20, 40, 59, 60, 80)] == [1, 4, 7, 11, 14, 14, 14]


def test_the_batch_is_never_empty(tg, monkeypatch):
    monkeypatch.setitem(tg.STAGES, "small", (tg.Stage(1.0, batch=0.01),))
    assert tg.rows_at(tg.Config(stages="small", num_steps=8), 0) == 1


def test_schedules_depend_on_the_step_alone(tg):
    c = tg.parse_config(["--preset=sprint"])[0]
    forward = [(tg.lr_scale_at(c, s), tg.momentum_at(c, s), tg.window_blocks_at(c, s)) for s in range(c.num_steps)]
    back = [(tg.lr_scale_at(c, s), tg.momentum_at(c, s), tg.window_blocks_at(c, s))
            for s in reversed(range(c.num_steps))]
    assert forward == back[::-1]
