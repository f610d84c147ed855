"""offload: what the proof shows, and the parts that it is made of."""

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, beyond, on_ranks, refusal, run_script

offload = beyond("offload")
question = pytest.mark.question
CPU = torch.device("cpu")
SCRIPT = ROOT / "beyond/offload.py"


def test_offload_proves_itself(tmp_path):
    done = run_script(SCRIPT, "--steps", 0, "--ranks", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and "three times the blocks" in done.stdout
    assert done.stderr == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n", [1, 3])
def test_every_row_holds_on_every_rank(n):
    def rows():
        return list(offload.rows(offload.dp.read_text(None, 65), dist.group.WORLD, CPU))

    for rank in on_ranks(n, rows):
        for row in rank:
            assert abs(row.error - row.wrong) < 1e-10, row
            for pair in (row.sent, row.held):
                assert pair is None or pair[0] == pair[1], row
    assert len(rank) == 16


@question("QO.1")
def test_the_host_steps_what_comes_down_and_sends_up_the_new_weights():
    def step():
        draw = torch.Generator().manual_seed(3)
        weights, *gradients = torch.randn(1 + 2, 8, generator=draw).bfloat16()
        device = offload.Device(CPU)
        state = torch.zeros(3, 4)
        state[0] = weights.view(2, 4)[dist.get_rank()]
        twin = weights.float().requires_grad_()
        optimizer = torch.optim.AdamW(
            [twin], offload.RATE, offload.BETAS, offload.EPS, offload.DECAY)
        for t in (1, 2):
            gradient = device.keep(gradients[dist.get_rank()].clone())
            offload.offload_step(device, weights, gradient, state, t, dist.group.WORLD)
            twin.grad = sum(gradients).float()
            optimizer.step()
        own = twin.view(2, 4)[dist.get_rank()]
        return (weights - twin).abs().max().item(), (state[0] - own).abs().max().item(), device

    for weights, master, device in on_ranks(2, step):
        assert weights < 2**-7 and master < 1e-6
        assert device.moved == {"down": 2 * 4 * 2, "up": 2 * 4 * 2}
        assert device.held == 0 and device.peak == (8 + 4 + 4) * 2


def events_of(units, ahead, folder):
    store = offload.Store(folder)
    tensors = [[torch.full((3,), float(u))] for u in range(units)]
    device = offload.Device(CPU)
    model = offload.Streamed(tensors, None, device, store, dist.group.WORLD, ahead)
    seen = [(u, whole.tolist()) for u, whole in model.visits([*range(units)])]
    store.close()
    assert seen == [(u, [float(u)] * 3) for u in range(units)] and device.held == 0
    return store.events


@question("QO.2")
def test_the_next_unit_is_asked_for_before_this_one_computes(tmp_path):
    r, w = "read weights {}".format, "wait weights {}".format
    assert on_ranks(1, events_of, 3, True, tmp_path) == [[
        r(0), w(0), r(1), "compute 0", w(1), r(2), "compute 1", w(2), "compute 2"]]  # fmt: skip
    assert on_ranks(1, events_of, 3, False, tmp_path) == [[
        r(0), w(0), "compute 0", r(1), w(1), "compute 1", r(2), w(2), "compute 2"]]  # fmt: skip


@question("QO.3")
@pytest.mark.parametrize("late", [False, True])
def test_a_late_step_has_the_gradient_of_the_weights_before_the_last_step(late):
    text = offload.dp.read_text(None, 65)

    def run(steps):
        group = dist.group.WORLD
        return offload.zero_offload(text, steps, group, CPU, torch.float64, late)[0]

    for steps in (1, 4):
        for found in on_ranks(2, run, steps):
            wanted = offload.twin(text, steps, late=late)
            assert torch.allclose(found, wanted, rtol=0, atol=1e-12), (steps, late)
    start = offload.parameters_to_vector(offload.fresh(4, torch.float64).parameters())
    assert torch.equal(offload.twin(text, 1, late=True), start), "no gradient has come yet"


def test_the_twin_and_the_units_compute_one_model():
    model, x_BS = offload.fresh(3, torch.float64), torch.arange(12).view(3, 4)
    x = x_BS
    for u, unit in enumerate(offload.units_of(model)):
        x = offload.compute_unit(u, unit, x)
    assert torch.equal(x, model(x_BS))


@pytest.mark.parametrize("compute, read, one_by_one, ahead", [
    ([1, 1, 1], [1, 1, 1], 6, 4), ([5, 5, 5], [1, 1, 1], 18, 16), ([1, 1, 1], [5, 5, 5], 18, 16),
    ([2], [3], 5, 5), ([1, 4], [2, 3], 10, 2 + 3 + 4),
])  # fmt: skip
def test_seconds_of_visits_are_those_of_two_streams(compute, read, one_by_one, ahead):
    assert offload.seconds(compute, read, False) == one_by_one
    assert offload.seconds(compute, read) == ahead
    done_read = done = start = 0.0  # by simulation: a read starts when the one before is taken
    for c, r in zip(compute, read):
        done_read = max(done_read, start) + r
        start = max(done, done_read)
        done = start + c
    assert done == ahead


def test_a_read_waits_for_the_write_before_it_and_has_what_was_written(tmp_path):
    store = offload.Store(tmp_path, rate=4e5)
    first, second = torch.randn(2, 10_000)
    store.write("x", first)  # a tenth of a second
    store.write("x", second)
    assert torch.equal(store.wait(store.read("x"), "x"), second)
    assert store.moved == {"read": 40_000, "written": 80_000}
    store.write("y", torch.arange(6).bfloat16().view(2, 3))
    assert store.read("y").result().tolist() == [[0, 1, 2], [3, 4, 5]]
    store.close()


def test_a_write_that_fails_is_raised_by_the_read(tmp_path):
    store = offload.Store(tmp_path / "nowhere")
    store.write("x", torch.ones(3))
    with pytest.raises(FileNotFoundError):
        store.read("x").result()
    with pytest.raises(FileNotFoundError):
        store.close()


def test_hidden_reads_are_those_with_a_computation_between():
    assert offload.hidden(["read weights 0", "wait weights 0", "compute 0"]) == 0
    assert offload.hidden(["read weights 1", "compute 0", "wait weights 1"]) == 1


def test_parameters_stay_where_they_are_when_activations_leave():
    linear, device = torch.nn.Linear(3, 5), offload.Device(CPU)
    x = torch.randn(4, 3, requires_grad=True)
    with offload.offloaded_activations(device, linear):
        y = linear(x).tanh()
    assert device.moved == {"down": (4 * 3 + 4 * 5) * 4, "up": 0}
    y.sum().backward()
    assert device.moved["up"] == device.moved["down"]


def test_offload_refuses_what_cannot_work():
    assert "9 ranks share 8 sequences" in refusal(SCRIPT, "--ranks", 9)
    assert "--text no such file" in refusal(SCRIPT, "--text", "no such file")


@pytest.mark.slow
def test_offload_trains_from_files_and_reads_ahead(tmp_path):
    done = run_script(SCRIPT, "--steps", 60, torchrun=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()
              if line.split()[:1] in (["20"], ["60"])]  # fmt: skip
    assert losses[1] < losses[0] and "read ahead" in done.stdout
