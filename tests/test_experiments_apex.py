"""The Apex lesson's numbers: dtypes, training, moved weights, memory, and the migration pairs."""

import math

import pytest
import torch

from amp_lab import apex as amp
from amp_lab.experiments import apex, migration
from amp_lab.experiments import migration_programs as programs
from amp_lab.tasks import train


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


def test_o0_trains_as_the_lab_s_own_loop_does():
    expected = train(apex.network(), steps=20)
    assert apex.train("O0", steps=20).losses == expected.losses


@pytest.mark.parametrize("level", apex.LEVELS)
def test_every_level_learns_with_its_own_scale(level):
    run = apex.train(level)
    assert run.verdict == "learns"
    assert run.final() == pytest.approx(apex.train("O0").final(), abs=0.02)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize(
    ("log2_scale", "verdict"),
    [(-24, "does not learn"), (-12, "learns"), (0, "learns"), (12, "learns"), (20, "NaN")],
)
def test_verdicts_of_static_scales(level, log2_scale, verdict):
    assert apex.train(level, 2.0**log2_scale).verdict == verdict


def test_verdict_follows_the_last_ten_losses():
    assert apex.Training([9.0] * 10 + [0.4] * 10, 1.0).verdict == "learns"
    assert apex.Training([0.1] * 10 + [0.6] * 10, 1.0).verdict == "does not learn"
    assert apex.Training([0.1] * 19 + [math.nan], 1.0).verdict == "NaN"
    assert apex.Training([0.1] * 19 + [math.inf], 1.0).verdict == "NaN"


DTYPES = {
    # weights of Linear, of BatchNorm, output of Linear, outputs outside, gradients, updated
    "O0": ["float32"] * 6,
    "O1": ["float32", "float32", "float16", "float16", "float32", "float32"],
    "O2": ["float16", "float32", "float16", "float32", "float16", "float32"],
    "O3": ["float16", "float16", "float16", "float32", "float16", "float16"],
    "bf16": ["bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16"],
    "bf16 + master": ["bfloat16", "float32", "bfloat16", "float32", "bfloat16", "float32"],
}


@pytest.mark.parametrize("level", apex.LEVELS)
def test_dtypes(level):
    found = apex.dtypes(level)
    assert [
        found[thing]
        for thing in (
            "weights of Linear",
            "weights of BatchNorm",
            "output of Linear",
            "outputs outside",
            "gradients of Linear",
            "updated by the optimizer",
        )
    ] == DTYPES[level]
    assert found["momentum"] == found["updated by the optimizer"]
    assert found["running mean"] == found["weights of BatchNorm"]
    assert found["loss"] == "float32"


def test_small_updates_move_master_weights_and_not_low_precision_ones():
    shares = {level: apex.moved(level, lr=1e-4) for level in apex.LEVELS}
    for level in ("O0", "O1", "O2", "bf16 + master"):
        assert shares[level] > 0.9
    assert shares["bf16"] < shares["O3"] < 0.2


def test_memory_in_bytes_per_parameter():
    names = ["weights", "gradients", "master weights", "master gradients", "momentum"]
    expected = {
        "O0": [4, 4, 0, 0, 4],
        "O1": [4, 4, 0, 0, 4],
        "O2": [2, 2, 4, 4, 4],
        "O3": [2, 2, 0, 0, 2],
        "bf16": [2, 2, 0, 0, 2],
        "bf16 + master": [2, 2, 4, 4, 4],
    }
    for level, bytes_each in expected.items():
        found = apex.memory(level)
        # Batch normalization's few parameters stay float32 under O2.
        assert [round(found[name]) for name in names] == bytes_each


def test_nothing_is_left_behind_after_an_error():
    def fail():
        with apex.initialized("O2"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(RuntimeError, match="before initialize"):
        amp.state_dict()


@pytest.mark.parametrize("pair", migration.PAIRS, ids=lambda pair: pair.what)
def test_migration_pairs_end_with_the_same_numbers(pair):
    assert pair.same()


def test_same_can_say_no():
    pair = migration.Pair("different", programs.step_apex, programs.clip_torch)
    assert not pair.same()
    pair = migration.Pair("more", programs.region_apex, programs.step_torch)
    assert not pair.same()


def test_programs_do_what_their_torch_amp_twin_does_with_torchs_own_classes(monkeypatch):
    """`autocast` and `GradScaler` in the right-hand column may be torch's."""
    monkeypatch.setattr(programs, "GradScaler", lambda **o: torch.amp.GradScaler("cpu", **o))
    for pair in migration.PAIRS:
        assert pair.same(), pair.what


def test_table_shows_the_source_of_every_program():
    table = migration.Table(migration.PAIRS)
    html, text = table._repr_html_(), repr(table)
    assert html.count("<pre") == 2 * len(migration.PAIRS)
    for pair in migration.PAIRS:
        assert pair.what in html
        assert migration.body(pair.torch) in text
    assert "with amp.scale_loss(loss_of(model, batch), optimizer) as scaled_loss:" in html
    assert "def step_apex" not in text
    assert migration.body(programs.step_torch).startswith("scaler = GradScaler()\nfor batch")
