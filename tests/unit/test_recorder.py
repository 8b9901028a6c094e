"""``lockstep.record`` in one process: what it writes, and what it must not touch."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.errors import DataError, OptionError
from lockstep.proof.recording import watches
from lockstep.proof.recording.digests import WIDTH
from lockstep.proof.recording.names import Names, parameters_of, torch_optimizer
from lockstep.proof.recording.record_frames import START, file_of
from lockstep.proof.recording.samples import samples_of, words_of
from lockstep.proof.records.run import Run

X, Y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


WEIGHT = ("parameter", "4.weight")


@pytest.fixture(scope="module", autouse=True)
def no_hooks_for_other_files() -> Iterator[None]:
    """The hook on all optimizers stays, and other tests count what a step calls."""
    yield
    while watches._hooks:
        watches._hooks.pop().remove()


def make_model(*, drop: float = 0.0) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(drop), nn.Linear(8, 3)
    )


def step(model: Any, optimizer: Any, index: int, recorder: Any = None) -> Tensor:
    part = torch.arange(10) + 10 * index
    loss = F.cross_entropy(model(X[part]), Y[part])
    if recorder is not None:
        recorder.batch(part)
        recorder.loss(loss, weight=len(part))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train(path: Path, steps: int = 3, **options: Any) -> Any:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with lockstep.record(model, optimizer, path, steps=steps, **options) as recorder:
        for index in range(5):
            step(model, optimizer, index, recorder)
    return model


# --- what is written ----------------------------------------------------------------------------


def test_a_record_has_all_of_a_training(tmp_path: Path) -> None:
    train(tmp_path)
    run = Run(tmp_path)
    assert (run.num_steps, run.world_size, run.missing) == (3, 1, [])
    assert run.computing_dtype == "float32"
    assert list(run.order) == ["0", "1", "4"]
    kinds = [kind for kind, _ in run.values(1)]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "gradient": 6,
        "slot": 18,  # step, exp_avg, exp_avg_sq
        "parameter": 6,
        "buffer": 3,
    }
    assert run.options(0)[0]["4.bias"]["lr"] == 0.01
    first = run.first.steps[1]
    assert [loss.weight for loss in first.losses] == [10.0]
    assert words_of(first.samples[0]).tolist() == list(range(10, 20))
    assert [kind for kind, _ in run.values(START)] == ["parameter"] * 6


def test_values_are_those_of_the_training(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.record(model, optimizer, tmp_path, steps=1):
        step(model, optimizer, 0)
        gradient = next(model.parameters()).grad
    assert gradient is not None
    values = Run(tmp_path).values(0)
    assert values["gradient", "0.weight"].size == pytest.approx(gradient.norm().item(), rel=1e-6)
    size = model[0].weight.norm().item()
    assert values["parameter", "0.weight"].size == pytest.approx(size, rel=1e-6)


def test_a_step_takes_at_most_64_bytes_of_each_tensor(tmp_path: Path) -> None:
    """Beside its number, and what is not of a tensor: samples, losses, a checksum."""
    train(tmp_path)
    for own in Run(tmp_path).first.steps.values():
        count = len(own.numbers) // 4
        assert len(own.digests) == count * WIDTH * 8 == count * 64
    train(tmp_path / "short", steps=1)
    sizes = [file_of(path, 0).stat().st_size for path in (tmp_path, tmp_path / "short")]
    assert sizes[0] - sizes[1] < 2 * (33 * 64 + 500)


def test_a_full_record_has_the_elements(tmp_path: Path) -> None:
    model = train(tmp_path / "full", steps=5, tensors="full")
    found = Run(tmp_path / "full").first.tensors(4)
    (weight,) = (each for entry, each in found if (entry.kind, entry.name) == WEIGHT)
    assert weight.equal(dict(model.named_parameters())["4.weight"].detach().flatten())
    train(tmp_path / "digest", steps=5)
    assert lockstep.compare(tmp_path / "full", tmp_path / "digest").has_same_bits


def test_full_records_name_the_element(tmp_path: Path) -> None:
    train(tmp_path / "one", tensors="full")
    model = make_model()
    with torch.no_grad():
        model[4].weight[2, 5] += 0.5
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with lockstep.record(model, optimizer, tmp_path / "other", steps=3, tensors="full"):
        step(model, optimizer, 0)
    outcome = lockstep.compare(tmp_path / "other", tmp_path / "one")
    assert "1 of 24 elements differ, most at [2, 5]" in outcome.elements
    assert outcome.elements in str(outcome).replace("\n", " ")


def test_microbatches_of_a_step_are_noted_together(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.record(model, optimizer, tmp_path) as recorder:
        for index in range(4):
            recorder.batch(torch.arange(5) + 5 * index)
            loss = F.cross_entropy(model(X[:5]), Y[:5])
            recorder.loss(loss)
            loss.backward()
            if index % 2:
                optimizer.step()
        recorder.batch([70, 71])
    steps = Run(tmp_path).first.steps
    assert [len(steps[index].losses) for index in (0, 1)] == [2, 2]
    assert not steps[2].is_complete
    assert words_of(steps[2].samples[0]).tolist() == [70, 71]


def test_a_closure_computes_the_gradients_that_are_recorded(tmp_path: Path) -> None:
    def run(path: Path, *, in_closure: bool) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X[:10]), Y[:10])
            recorder.loss(loss, weight=10)
            loss.backward()
            return loss

        with lockstep.record(model, optimizer, path) as recorder:
            for _ in range(3):
                if in_closure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()

    run(tmp_path / "closure", in_closure=True)
    run(tmp_path / "plain", in_closure=False)
    assert lockstep.compare(tmp_path / "closure", tmp_path / "plain").has_same_bits


def test_optimizers_that_are_made_within_are_found(tmp_path: Path) -> None:
    """As where a Trainer makes them; others are left alone."""
    model, other = make_model(), make_model()
    with lockstep.record(model, None, tmp_path, steps=2):
        foreign = torch.optim.SGD(other.parameters(), lr=0.1)
        step(other, foreign, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(3):
            step(model, optimizer, index)
    assert Run(tmp_path).num_steps == 2


def test_several_optimizers(tmp_path: Path) -> None:
    model = make_model()
    halves = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[4].parameters())]
    with lockstep.record(model, halves, tmp_path, steps=4):
        for _ in range(2):
            F.cross_entropy(model(X[:10]), Y[:10]).backward()
            halves[0].step()
            halves[1].step()
    steps = Run(tmp_path).first.steps
    assert [steps[index].optimizer for index in range(4)] == [0, 1, 0, 1]


# --- what it must not touch ---------------------------------------------------------------------


def test_the_numbers_of_a_run_are_the_same_with_and_without(tmp_path: Path) -> None:
    found = []
    for recording in (False, True):
        model = make_model(drop=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(5)
        if recording:
            with lockstep.record(model, optimizer, tmp_path) as recorder:
                losses = [step(model, optimizer, index, recorder) for index in range(6)]
        else:
            losses = [step(model, optimizer, index) for index in range(6)]
        state = [each for own in optimizer.state.values() for each in own.values()]
        found.append([*losses, *model.state_dict().values(), *state, torch.get_rng_state()])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_no_hook_is_left(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    with lockstep.record(model, optimizer, tmp_path, steps=1):
        optimizer.register_step_post_hook(lambda *_: seen.append(1))  # behind the recorder's
        step(model, optimizer, 0)
        assert not any(each._forward_hooks for each in model.modules())
        step(model, optimizer, 1)
    assert seen == [1, 1]
    assert not optimizer._optimizer_step_pre_hooks
    assert len(optimizer._optimizer_step_post_hooks) == 1


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("tensors", ["digest", "full"])
def test_it_keeps_nothing_alive(is_given: bool, tensors: Any, tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    given = optimizer if is_given else None
    recorder = lockstep.record(model, given, tmp_path, tensors=tensors)
    del given
    with recorder:
        step(model, optimizer, 0, recorder)
        references = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
        del model, optimizer
        gc.collect()
        assert {each() for each in references} == {None}


def test_an_error_in_the_loop_leaves_what_is_there(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail() -> None:
        with lockstep.record(model, optimizer, tmp_path) as recorder:
            step(model, optimizer, 0, recorder)
            recorder.batch(torch.arange(3))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    run = Run(tmp_path)
    assert run.num_steps == 1
    assert not run.first.steps[1].is_complete


def test_a_failed_step_is_recorded_up_to_its_gradients(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.record(model, optimizer, tmp_path) as recorder:
        step(model, optimizer, 0, recorder)
        optimizer.param_groups[0]["lr"] = None
        with pytest.raises(TypeError):
            step(model, optimizer, 1, recorder)
    run = Run(tmp_path)
    assert run.num_steps == 1
    assert ("gradient", "4.weight") in run.values(1)


def test_whatever_ends_the_process_earlier_steps_can_be_read(tmp_path: Path) -> None:
    train(tmp_path)
    path = file_of(tmp_path, 0)
    whole = path.read_bytes()
    readable = set()
    for length in range(len(whole) - 2000, len(whole), 97):
        path.write_bytes(whole[:length])
        readable.add(Run(tmp_path).num_steps)
    assert readable == {2}
    damaged = bytearray(whole)
    damaged[-100] ^= 1
    path.write_bytes(bytes(damaged))
    assert Run(tmp_path).num_steps == 2


def test_records_in_threads_do_not_mix(tmp_path: Path) -> None:
    def work(name: str) -> None:
        model = nn.Linear(4, 3)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep.record(model, None, tmp_path / name) as recorder:
            for index in range(5):
                step(model, optimizer, index, recorder)

    names = ["one", "two", "three"]
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for name in names[1:]:
        assert lockstep.compare(tmp_path / name, tmp_path / "one").has_same_bits


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_recorded_and_computes_the_same(backend: str, tmp_path: Path) -> None:
    def run(recording: bool) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = make_model()
        compiled: Any = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if recording:
            with lockstep.record(compiled, optimizer, tmp_path) as recorder:
                losses = [step(compiled, optimizer, index, recorder) for index in range(6)]
        else:
            losses = [step(compiled, optimizer, index) for index in range(6)]
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        return [*losses, *model.state_dict().values()], breaks

    (plain, own), (recorded, others) = run(False), run(True)
    assert all(one.equal(other) for one, other in zip(plain, recorded, strict=True))
    assert own == others
    assert next(iter(Run(tmp_path).values(START))) == ("parameter", "0.weight")


def test_arithmetic_of_the_user_does_not_reach_the_record(tmp_path: Path) -> None:
    """Autocast around the step, and another default dtype."""

    def run(path: Path, around: Callable[[], Any]) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep.record(model, optimizer, path, steps=2):
            for _ in range(2):
                F.cross_entropy(model(X[:10]), Y[:10]).backward()
                with around():
                    optimizer.step()

    run(tmp_path / "plain", lambda: torch.autocast("cpu", enabled=False))
    run(tmp_path / "cast", lambda: torch.autocast("cpu", torch.bfloat16))
    assert lockstep.compare(tmp_path / "cast", tmp_path / "plain").has_same_bits


# --- names, samples, arguments ------------------------------------------------------------------


def test_names_are_those_of_the_users_model() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)  # a name of the user's
            self.part = nn.DataParallel(nn.Linear(2, 2))

    assert [name for name, _ in parameters_of(Own())] == [
        *("module.weight", "module.bias", "part.weight", "part.bias")
    ]
    canonical = Names(nn.Linear(1, 1))
    assert canonical("_orig_mod.a._fsdp_wrapped_module.b") == "a.b"
    assert canonical("a._checkpoint_wrapped_module.module.b") == "a.module.b"


def test_wrapped_optimizers_are_found() -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.optimizer = inner

        def step(self) -> None:
            self.optimizer.step()

    inner = torch.optim.SGD(make_model().parameters(), lr=0.1)
    assert torch_optimizer(Wrapper(Wrapper(inner))) is inner
    assert torch_optimizer(inner) is inner


@pytest.mark.parametrize(
    ("given", "count", "are_ids"),
    [
        (([3, 1, 2],), 3, True),
        ((torch.tensor([3, 1, 2]),), 3, True),
        ((np.arange(4),), 4, True),
        ((torch.randn(3, 2),), 3, False),
        ((torch.randn(3, 2), torch.arange(3)), 3, False),
        (({"x": torch.randn(3, 5).half(), "y": [torch.arange(3)]},), 3, False),
        ((["a", "b"],), 2, False),
    ],
)
def test_samples_have_a_word_each(given: tuple[Any, ...], count: int, are_ids: bool) -> None:
    found = samples_of(given)
    assert (len(words_of(found)), found.are_ids) == (count, are_ids)
    assert len(set(words_of(found).tolist())) == count


def test_a_samples_word_does_not_depend_on_its_batch() -> None:
    inputs = torch.randn(12, 3, 5)
    everything = words_of(samples_of((inputs,)))
    assert words_of(samples_of((inputs[::2],))).tolist() == everything[::2].tolist()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": 3}, "must be a module"),
        ({"optimizer": 3}, "must be one of torch's or Keras's"),
        ({"optimizer": []}, "must be one of torch's or Keras's"),
        ({"steps": 0}, "at least 1"),
        ({"tensors": "all"}, '"digest" or "full"'),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"model": model, "optimizer": optimizer, "path": tmp_path, **change}
    with pytest.raises(OptionError, match=told), lockstep.record(**given):
        pass


def test_parts_of_a_batch_have_the_same_samples(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.record(model, optimizer, tmp_path) as recorder:
        step(model, optimizer, 0)
        with pytest.raises(OptionError, match=r"parts with \[2, 3\] samples"):
            recorder.batch(torch.zeros(2, 2), torch.zeros(3))
        with pytest.raises(OptionError, match="nothing"):
            recorder.batch()
    with pytest.raises(OptionError, match="can be entered once"):
        recorder.__enter__()


@pytest.mark.parametrize("bias", [False, True])
def test_adam_excuses_no_change_of_a_running_mean(bias: bool, tmp_path: Path) -> None:
    """Its full steps of rounding move a bias before BatchNorm, and its mean; nothing else does."""

    def record(path: Path, change: float) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=bias), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        batches = torch.randn(4, 16, 4)
        with lockstep.record(model, optimizer, path, steps=4):
            for index, batch in enumerate(batches):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                if index == 2:
                    model[1].running_mean.add_(change)  # type: ignore[operator]
                optimizer.step()

    record(tmp_path / "right", 0.0)
    record(tmp_path / "wrong", 1e-3)
    found = lockstep.compare(tmp_path / "wrong", tmp_path / "right")
    assert found.first is not None
    assert (found.first.name, found.first.step) == ("1.running_mean", 2)
    assert found.cause is not None
    assert found.cause.kind == "buffers"


def test_what_is_no_record_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There must be a record"):
        Run(tmp_path)
    file_of(tmp_path, 0).write_bytes(b"something else")
    with pytest.raises(DataError, match="must begin"):
        Run(tmp_path)


def test_records_of_other_models_are_not_compared(tmp_path: Path) -> None:
    train(tmp_path / "one")
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.record(model, optimizer, tmp_path / "other"):
        step(model, optimizer, 0)
    with pytest.raises(DataError, match=r"0\.bias, 0\.weight, 1\.bias, \.\.\. and bias, weight"):
        lockstep.compare(tmp_path / "one", tmp_path / "other")
