"""Room 7: step -> stage, rows, rate, momentum, candidates, average; values at the borders."""
import pytest
import torch
from model_helpers import replaced


def use_stages(tg, monkeypatch, *stages):
    """Let the record's table be these rows."""
    monkeypatch.setitem(tg.STAGES, "record", stages)


def test_a_stage_begins_where_the_one_before_ends_and_no_batch_is_more_than_the_whole(tg):
    for name, stages in tg.STAGES.items():
        ends = [stage.until for stage in stages]
        assert 0 < ends[0] and ends == sorted(set(ends)) and ends[-1] == 1, name
        for stage in stages:
            assert 0 < stage.batch_share <= 1 and 0 <= stage.candidates <= 1 and stage.window > 0, name


@pytest.mark.recipe
def test_the_rate_is_flat_and_then_falls_linearly_to_its_floor(tg):
    c = tg.Config(num_steps=1000, cooldown_frac=0.4, lr_floor=0.1)
    assert tg.cooldown_at(c, 0) == tg.cooldown_at(c, 300) == 1.0
    assert tg.cooldown_at(c, 600) == pytest.approx(1.0)
    assert tg.cooldown_at(c, 601) < 1.0
    assert tg.cooldown_at(c, 800) == pytest.approx(0.5 + 0.5 * 0.1)
    assert tg.cooldown_at(c, 1000) == pytest.approx(0.1)
    falls = [tg.cooldown_at(c, s) - tg.cooldown_at(c, s + 1) for s in range(600, 1000)]
    assert max(falls) == pytest.approx(min(falls), rel=1e-6)


@pytest.mark.recipe
def test_without_a_cooldown_the_rate_stays(tg):
    c = tg.Config(num_steps=10, cooldown_frac=0.0)
    assert [tg.cooldown_at(c, s) for s in range(11)] == [1.0] * 11


@pytest.mark.recipe
def test_a_cooldown_over_the_whole_run_begins_at_step_0(tg):
    c = tg.Config(num_steps=10, cooldown_frac=1.0, lr_floor=0.0)
    assert [tg.cooldown_at(c, s) for s in range(11)] == pytest.approx([1 - s / 10 for s in range(11)])


@pytest.mark.recipe
def test_momentum_rises_over_a_quarter_of_the_run_and_falls_at_its_end(tg):
    c = tg.Config(num_steps=1000)
    assert tg.momentum_at(c, 0) == 0.85
    assert tg.momentum_at(c, 125) == pytest.approx(0.90)
    assert tg.momentum_at(c, 250) == tg.momentum_at(c, 960) == pytest.approx(0.95)
    assert tg.momentum_at(c, 980) == pytest.approx(0.90) and tg.momentum_at(c, 1000) == pytest.approx(0.85)


def test_every_step_has_its_stage_and_batch(tg, monkeypatch):
    stages = (tg.Stage(0.25, 32, 3, 0.2, 0.25), tg.Stage(0.75, 0, 5, 0.5, 0.5), tg.Stage(1.0, 0, 7, 0.0))
    use_stages(tg, monkeypatch, *stages)
    c = tg.Config(num_steps=80, stages="record", vocab_size=50_257, batch_tokens=32 * 128, row_tokens=128)
    assert [tg.stage_at(c, s) for s in (0, 19, 20, 59, 60, 79, 80)] == [stages[i] for i in (0, 0, 1, 1, 2, 2, 2)]
    assert [tg.rows_at(c, s) for s in (0, 19, 20, 60)] == [8, 8, 16, 32]
    assert [tg.candidates_at(c, s) for s in (0, 20, 60)] == [10_112, 25_216, 0]           # multiples of 128


def test_the_rate_is_the_cooldown_times_the_square_root_of_the_batch_share(tg, monkeypatch):
    use_stages(tg, monkeypatch, tg.Stage(0.5, 0, 3, 0.0, 0.25), tg.Stage(1.0, 0, 3, 0.0, 1.0))
    monkeypatch.setattr(tg, "cooldown_at", lambda c, step: 1 - step / 100)
    c = tg.Config(num_steps=80, stages="record", batch_tokens=32 * 128, row_tokens=128)
    assert [tg.lr_scale_at(c, s) for s in (0, 30, 40, 60)] == pytest.approx([0.5, 0.35, 0.6, 0.4])


def test_the_batch_is_never_empty_and_a_small_vocabulary_is_taken_whole(tg, monkeypatch):
    use_stages(tg, monkeypatch, tg.Stage(1.0, 0, 3, 0.5, 0.01))
    c = tg.Config(num_steps=8, stages="record", batch_tokens=32 * 128, row_tokens=128, vocab_size=100)
    assert tg.rows_at(c, 0) == 1
    assert tg.lr_scale_at(c, 0) == (1 / 32) ** 0.5 * tg.cooldown_at(c, 0)        # of the batch that is taken
    assert tg.candidates_at(c, 0) == 128


def test_rows_are_rounded_to_the_nearest_number(tg, monkeypatch):
    c = tg.Config(num_steps=8, stages="record", batch_tokens=8 * 128, row_tokens=128)
    for share, rows in ((0.3, 2), (0.35, 3), (1 / 3, 3), (0.99, 8)):
        use_stages(tg, monkeypatch, tg.Stage(1.0, 0, 3, 0.0, share))
        assert tg.rows_at(c, 0) == rows


@pytest.mark.recipe
def test_the_sprint_takes_about_80_million_tokens_in_steps_of_one_size(tg):
    c = tg.parse_config(["--preset=sprint"])[0]
    rows = [tg.rows_at(c, step) for step in range(c.num_steps)]
    assert set(rows) == {c.micro_rows} and 78e6 < sum(rows) * c.row_tokens < 83e6
    assert tg.candidates_at(c, 0) == 10_112 and tg.candidates_at(c, c.num_steps - 1) == 0
    full = sum(n for step, n in enumerate(rows) if not tg.candidates_at(c, step)) / sum(rows)
    assert 0.07 < full < 0.09
    assert tg.lr_scale_at(c, 0) == 1.0 and tg.lr_scale_at(c, c.num_steps) == pytest.approx(0.3)


@pytest.mark.recipe
def test_the_record_shares_its_rows_among_eight_ranks(tg):
    c = tg.Config()
    assert {tg.rows_at(c, step) for step in range(c.num_steps)} == {8, 16}


def test_the_average_begins_with_a_copy_and_has_a_third_of_its_length_as_time_constant(tg):
    c = tg.Config(num_steps=400, ema_frac=0.25, ema_blend=0.5)
    rates = [tg.ema_rate_at(c, step) for step in range(400)]
    assert rates[:299] == [0.0] * 299 and rates[299] == 1.0 and rates[300:] == [3 / 100] * 100
    assert not any(tg.ema_rate_at(replaced(c, ema_blend=0.0), step) for step in range(400))


def test_schedules_depend_on_the_step_alone(tg):
    c = tg.parse_config(["--preset=sprint"])[0]

    def all_of(s):
        return tg.lr_scale_at(c, s), tg.momentum_at(c, s), tg.rows_at(c, s), tg.candidates_at(c, s)
    assert [all_of(s) for s in range(c.num_steps)] == [all_of(s) for s in reversed(range(c.num_steps))][::-1]


@pytest.mark.parametrize("frac", (1.0, 0.99, 0.5, 0.1))
def test_an_average_over_any_part_of_the_run_is_an_average(tg, frac):
    """Its shares of all weights so far add up to 1: it begins with a copy, also when it covers the whole run."""
    c, mass = tg.Config(num_steps=30, ema_frac=frac, ema_blend=0.5), 0.0
    rates = [tg.ema_rate_at(c, step) for step in range(30)]
    for rate in rates:
        mass += rate * (1 - mass)
    assert mass == pytest.approx(1.0) and 1.0 in rates


def test_weights_of_further_targets_are_linear_within_a_stage(tg, monkeypatch):
    use_stages(tg, monkeypatch, tg.Stage(0.5, 0, 3, 0.0, further_weights=(0.5, 0.25)),
               tg.Stage(0.75, 0, 3, 0.0, further_weights=(0.5,)), tg.Stage(1.0, 0, 5, 0.0))
    c = tg.Config(num_steps=80, stages="record")
    assert [tg.further_weights_at(c, step) for step in (0, 20, 40, 50, 60, 80)] == [
        (0.5, 0.25), (0.5, 0.125), (0.5,), (0.25,), (), ()]


def test_further_targets_weigh_no_more_than_the_gradients_scale_allows(tg):
    """G_SCALE, check_config's limit of the softcap and the stages' weights are three places for one bound."""
    heaviest = max(sum(stage.further_weights) for stages in tg.STAGES.values() for stage in stages)
    steepest = 16 / 4                                        # cap / (4 width), where check_config stops
    assert heaviest <= 0.75 and tg.G_SCALE * (1 + 0.75) * steepest <= torch.finfo(torch.float8_e5m2).max
