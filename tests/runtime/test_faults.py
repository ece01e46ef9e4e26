"""Each fault is real, strikes where it is told to, and nothing happens without the variable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError, ExitCode
from lockstep.runtime import faults
from lockstep.runtime.faults import KINDS, PLACES, STRIKES, VARIABLE, Fault, InjectedFault, Plan, parse, plan

# Ends processes for real: imports no torch, so that each costs a tenth of a second.
WORKER = """
import sys
from lockstep.runtime import faults
assert "torch" not in sys.modules
plan = faults.plan(rank=int(sys.argv[1]))
for step in range(3):
    for place in faults.PLACES:
        plan.at(place, step, step_seconds=0.01)
    print("done", step, flush=True)
"""


def worker(text: str, rank: int = 1) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, VARIABLE: text}
    command = [sys.executable, "-c", WORKER, str(rank)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def with_gradients(model: nn.Module) -> nn.Module:
    model(torch.ones(2, 4)).sum().backward()
    return model


def changed_bits(before: torch.Tensor, after: torch.Tensor) -> list[tuple[int, int]]:
    """(flat index, mask) of every element whose bits differ."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[before.element_size()]
    width = 8 * before.element_size()
    xor = (before.reshape(-1).view(integer) ^ after.reshape(-1).view(integer)).tolist()
    return [(index, value & ((1 << width) - 1)) for index, value in enumerate(xor) if value]


def test_the_documented_examples_parse() -> None:
    assert parse("exit@rank=1,step=3,code=7") == (Fault("exit", rank=1, step=3, code=7),)
    flip = parse("flip_grad@rank=2,step=4,bit=3,tensor=layers.0.attention.wq.weight,index=9")[0]
    assert (flip.tensor, flip.index, flip.bit) == ("layers.0.attention.wq.weight", 9, 3)
    several = parse(" kill@rank=0,step=2 ; slow@rank=1,factor=1.3; raise@step=1,where=loader;")
    assert [fault.kind for fault in several] == ["kill", "slow", "raise"]
    assert several[1].step is None
    for kind in KINDS:
        extra = ",bit=0" if kind.startswith("flip_") else ""
        assert parse(f"{kind}@rank=0,step=0{extra}")[0].kind == kind
    assert parse("") == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("explode@step=1", "explode"),
        ("nan_los@step=1", "nan_loss"),
        ("kill", "no '@'"),
        ("kill@step", "step"),
        ("kill@stp=1", "step"),
        ("kill@step=x", "whole number"),
        ("kill@step=-1", "whole number"),
        ("kill@step=1,step=2", "step"),
        ("kill@code=1", "code"),
        ("exit@code=256", "255"),
        ("raise@where=moon", "loader"),
        ("slow@factor=0.5", "from 1"),
        ("slow@factor=nan", "from 1"),
        ("flip_grad@step=1", "bit"),
        ("flip_grad@bit=64", "63"),
        ("kill@signal=65", "signal"),
        ("nan_grad@tensor=", "tensor"),
    ],
)
def test_bad_grammar_is_a_clear_usage_error(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(text)
    assert caught.value.exit_code == ExitCode.USAGE
    assert named in str(caught.value)
    assert VARIABLE in str(caught.value)


def test_inert_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    quiet = plan()
    assert not quiet.armed
    assert not quiet.needs_hooks
    model = with_gradients(small_model())
    before = {name: (tensor.clone(), tensor.grad.clone()) for name, tensor in model.named_parameters()}
    quiet.attach(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    loss = torch.ones(())
    for step in range(3):
        for place in PLACES:
            quiet.at(place, step, step_seconds=10.0)
        assert quiet.loss(loss, step) is loss
        quiet.gradients(model.named_parameters(), step)
        quiet.weights(model.named_parameters(), step)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name][0])
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, before[name][1])


def test_another_workers_fault_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "raise@rank=1,step=0;nan_loss@rank=2")
    assert not plan(rank=0).armed
    with pytest.raises(InjectedFault):
        plan(rank=1).at("forward", 0)
    assert plan(rank=2).loss(torch.ones(()), 5).isnan()


@pytest.mark.parametrize("where", PLACES)
def test_raise_strikes_at_its_place_and_step_only(where: str) -> None:
    armed = plan(f"raise@step=2,where={where}")
    for step in (0, 1, 3):
        for place in PLACES:
            armed.at(place, step)
    for place in PLACES:
        if place != where:
            armed.at(place, 2)
    with pytest.raises(InjectedFault, match=f"step 2, {where}"):
        armed.at(where, 2)


def test_a_bad_loss_leaves_the_gradient_good() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    for kind, bad in (("nan_loss", torch.isnan), ("inf_loss", torch.isposinf)):
        armed = plan(f"{kind}@step=1")
        good = weight * 3
        assert armed.loss(good, 0) is good
        spoilt = armed.loss(good, 1)
        assert bad(spoilt)
        assert torch.autograd.grad(spoilt, weight)[0] == 3


@pytest.mark.parametrize(("kind", "bad"), [("nan", torch.isnan), ("inf", torch.isinf)])
def test_bad_gradients(kind: str, bad) -> None:
    model = with_gradients(small_model())
    gradients = {name: tensor.grad for name, tensor in model.named_parameters()}
    plan(f"{kind}_grad@step=1,tensor=2.weight").gradients(model.named_parameters(), 0)
    assert not any(bad(gradient).any() for gradient in gradients.values())
    plan(f"{kind}_grad@step=1,tensor=2.weight").gradients(model.named_parameters(), 1)
    assert [name for name, gradient in gradients.items() if bad(gradient).any()] == ["2.weight"]
    assert bad(gradients["2.weight"]).all()
    plan(f"{kind}_grad@step=1,index=5").gradients(model.named_parameters(), 1)
    assert bad(gradients["0.weight"]).reshape(-1).nonzero().tolist() == [[5]]


def test_bad_weights_need_no_gradient() -> None:
    model = small_model()
    plan("nan_weight@step=0,tensor=0.bias,index=1").weights(model.named_parameters(), 0)
    assert {name: int(tensor.isnan().sum()) for name, tensor in model.named_parameters()} == {
        "0.weight": 0, "0.bias": 1, "2.weight": 0, "2.bias": 0,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_flips_change_exactly_the_named_bits(dtype: torch.dtype) -> None:
    width = 8 * dtype.itemsize
    for bit in range(width):
        weight = nn.Parameter(torch.randn(3, 4).to(dtype))
        before = weight.detach().clone()
        plan(f"flip_weight@step=0,bit={bit},index=7").weights([("w", weight)], 0)
        assert changed_bits(before, weight.detach()) == [(7, 1 << bit)]
    weight = nn.Parameter(torch.randn(4, 3).to(dtype).t())  # not contiguous
    weight.grad = torch.randn(4, 3).to(dtype).t()
    before, weights = weight.grad.clone(), weight.detach().clone()
    plan(f"flip_grad@step=0,bit={width - 1},index=6,tensor=w").gradients([("w", weight)], 0)
    assert changed_bits(before, weight.grad) == [(6, 1 << (width - 1))]
    assert torch.equal(weights, weight.detach())


def test_a_fault_that_cannot_be_is_refused() -> None:
    model = with_gradients(small_model())
    for text, named in {
        "flip_weight@bit=40": "32 bits",
        "nan_weight@index=12": "12 elements",
        "nan_weight@tensor=0.wieght": "0.weight",
    }.items():
        with pytest.raises(ConfigError, match=named):
            plan(text).weights(model.named_parameters(), 0)
    with pytest.raises(ConfigError, match="no module is called '7'"):
        plan("nan_act@module=7").attach(model)


def test_a_bad_activation_comes_from_the_named_module() -> None:
    seen: dict[str, bool] = {}

    def look(name: str):
        return lambda _module, _inputs, output: seen.__setitem__(name, bool(output.isnan().any()))

    for module, expected in (("1", {"0": False, "1": True, "2": True}), ("", {"0": True, "1": True, "2": True})):
        model = small_model()
        armed = plan(f"nan_act@step=1,module={module}" if module else "nan_act@step=1")
        assert armed.needs_hooks
        armed.attach(model)
        for name, child in model.named_children():
            child.register_forward_hook(look(name))
        for step, result in ((0, dict.fromkeys("012", False)), (1, expected), (2, dict.fromkeys("012", False))):
            armed.at("forward", step)
            model(torch.ones(1, 4))
            assert seen == result, (module, step)


def test_slow_stretches_the_work_and_not_its_own_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    armed, step_seconds = plan("slow@factor=3"), 0.0
    for step in range(5):
        armed.at("loader", step, step_seconds=step_seconds)  # told at one place, used at another
        armed.at("forward", step)
        step_seconds = 1.0 + slept[-1]  # a step of one second, and the sleep before it
    assert slept == [0.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("factor", [1.3, 3, 20])
def test_a_gpu_that_is_some_steps_behind_is_slowed_by_the_same(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """What is told is of a step that ended some time ago: of its time, its own sleep is none of the work."""
    slept: list[float] = []
    monkeypatch.setattr(faults, "_delay", slept.append)
    armed = plan(f"slow@factor={factor}")
    for step in range(12):
        told = {"step_seconds": 1.0 + slept[step - 2], "of": step - 2} if step > 1 else {}
        armed.at("loader", step, **told)
        armed.at("forward", step)
    assert slept == pytest.approx([0.0] * 2 + [factor - 1] * 10)


def test_a_gpu_is_kept_busy_and_its_host_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(faults.time, "sleep", lambda _: pytest.fail("the host runs ahead: nobody would notice"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append, raising=False)
    monkeypatch.setattr(faults, "_cycles_per_second", lambda: 2e9)
    faults._delay(0.25)
    assert cycles == [500_000_000]


def test_oom_is_a_real_memory_error() -> None:
    with pytest.raises(MemoryError):
        plan("oom@step=0").at("forward", 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_oom_is_a_real_device_error() -> None:
    torch.zeros(1, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        plan("oom@step=0").at("forward", 0)


def test_exit_is_an_exit() -> None:
    with pytest.raises(SystemExit) as caught:
        plan("exit@step=0,code=7").at("forward", 0)
    assert caught.value.code == 7


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("exit@rank=1,step=1,code=7", 7),
        ("kill@rank=1,step=1", -signal.SIGKILL),
        ("kill@rank=1,step=1,where=backward,signal=11", -signal.SIGSEGV),
        ("kill@rank=1,step=1,where=optimizer,signal=6", -signal.SIGABRT),
    ],
)
def test_processes_really_die(text: str, code: int) -> None:
    ended = worker(text)
    assert ended.returncode == code
    assert ended.stdout == "done 0\n"


def test_stop_really_stops_the_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, "1"],
        env={**os.environ, VARIABLE: "kill@rank=1,step=1,signal=19"},
        stdout=subprocess.PIPE,
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert os.WSTOPSIG(status) == signal.SIGSTOP
    finally:
        process.kill()
        process.communicate()


def test_a_worker_that_is_not_meant_finishes() -> None:
    ended = worker("kill@rank=0,step=1;slow@rank=1,factor=2")
    assert (ended.returncode, ended.stdout) == (0, "done 0\ndone 1\ndone 2\n")


def test_every_kind_has_something_that_does_it() -> None:
    in_the_loop = {"slow", "nan_loss", "inf_loss", "nan_act", "inf_act"}
    in_tensors = {kind for kind in KINDS if kind.endswith(("_grad", "_weight"))}
    assert set(KINDS) == set(STRIKES) | in_the_loop | in_tensors


def test_the_check_on_the_hot_path_is_one_attribute() -> None:
    assert Plan().armed is False
    assert Plan((Fault("kill"),)).armed is True


def test_what_strikes_once_is_gone_when_the_step_is_run_again() -> None:
    import torch

    plan = Plan(parse("nan_loss@step=2,once=1;inf_loss@step=3"))
    fine = torch.zeros(())
    assert torch.isnan(plan.loss(fine, 2))
    assert torch.isnan(plan.loss(fine, 2)), "within one pass it goes on: a step may have several micro-batches"
    plan.again(2)
    assert plan.loss(fine, 2) == 0
    plan.again(3)
    assert torch.isinf(plan.loss(fine, 3))
    plan.again(3)
    assert torch.isinf(plan.loss(fine, 3)), "the others strike as often as the step is run"


def test_an_activation_that_strikes_once() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    plan = Plan(parse("inf_act@step=1,module=0,once=1"))
    plan.attach(model)
    for step, bad in ((0, False), (1, True)):
        plan.at("forward", step)
        assert torch.isinf(model(torch.ones(1, 2))).any() == bad
    plan.again(1)
    assert torch.isfinite(model(torch.ones(1, 2))).all()


def test_a_replica_of_a_check_is_chosen_by_card_slot_round_and_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def strikes(text: str) -> bool:
        return plan(f"kill@{text}", rank=9).armed

    monkeypatch.setenv(faults.REPLICA, "rank=3,slot=1,round=2,node=4")
    assert strikes("rank=3")
    assert not strikes("rank=9"), "the card's number is the rank, whoever has started it"
    for key, mine in (("slot", 1), ("round", 2), ("node", 4)):
        assert strikes(f"{key}={mine}")
        assert not strikes(f"{key}={mine + 1}")
    assert not strikes("rank=3,slot=2"), "all of them must fit"
    monkeypatch.delenv(faults.REPLICA)
    assert strikes("rank=9,slot=0,round=0,node=0"), "outside a check these are 0"
