"""speed: what the proof shows, and the parts that it is made of."""

import heapq
import itertools
import math
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ROOT, beyond, on_ranks, refusal, run_script

speed = beyond("speed")
question = pytest.mark.question
CPU = torch.device("cpu")
SCRIPT = ROOT / "beyond/speed.py"
PARTS = speed.recompute_rows, speed.plan_rows, speed.compile_rows


def test_speed_proves_itself(tmp_path):
    done = run_script(SCRIPT, "--steps", 0, "--ranks", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS CLAIMED" not in done.stdout and "copied to the old one" in done.stdout
    assert done.stderr == "" and list(tmp_path.iterdir()) == []


def holds(row):
    low, high = row.bound or (row.wrong - 1e-6, row.wrong + 1e-6)
    assert low <= row.error <= high, row
    assert row.bound or row.wrong or row.error < 1e-10, row
    for pair in (row.sent, row.held):
        assert pair is None or pair[0] == pair[1], row


@pytest.mark.parametrize("n", [1, 4])
def test_every_row_of_plans_holds_on_every_rank(n):
    def rows():
        return [row for part in PARTS[:2] for row in part(dist.group.WORLD, CPU)]

    for rank in on_ranks(n, rows):
        assert len(rank) == 14
        for row in rank:
            holds(row)


def held_by(plan, boundary, inside):
    """The most bytes that are held after any operation of a plan, from its list alone."""
    inputs, graphs, sums, gradient, most = {0}, set(), set(), 0, 0
    for kind, i in plan:
        inputs |= {i + 1} if kind in ("forward", "move", "output") else set()
        graphs |= {i} if kind in ("graph", "send") else set()
        sums = sums | {i} if kind == "send" else sums - {i} if kind == "output" else sums
        if kind in ("move", "backward", "loss"):
            inputs, graphs = inputs - {i}, graphs - ({i} if kind == "backward" else set())
        gradient = gradient or boundary * (kind == "loss")
        alive = boundary * (len(inputs | graphs) + len(sums)) + gradient
        most = max(most, alive + sum(inside[j] for j in graphs))
    return most


def runs(plan, seconds):
    return sum(seconds[i] for kind, i in plan if kind in ("forward", "move", "send", "graph"))


def shortest(seconds, boundary, inside, budget):
    """Least seconds of forward of any order of operations, by Dijkstra's search over all that can
    be held: inputs, graphs, and the number of blocks (the loss is the last) left to go back."""
    layers = len(seconds)
    heap, count, done = [(0, 0, (frozenset([0]), frozenset(), layers + 1))], 0, set()
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        inputs, graphs, left = state
        if left == 0:
            return cost
        after = [(0, (inputs - {i}, graphs, left)) for i in inputs]
        after += [(0, (inputs, graphs - {i}, left)) for i in graphs]
        for i in inputs - {layers}:
            further, graph = inputs | {i + 1}, graphs | {i}
            moved = [(further, graphs), (further - {i}, graphs), (inputs, graph), (further, graph)]
            after += [(seconds[i], (*pair, left)) for pair in moved if i < left]
        last = left - 1
        if last == layers and last in inputs or last in graphs:
            after.append((0, (inputs - {last}, graphs - {last}, last)))
        for more, (inputs, graphs, left) in after:
            gradient = left <= layers  # the loss has gone back
            alive = boundary * (gradient + len(inputs | graphs)) + sum(inside[i] for i in graphs)
            if alive <= budget:
                count += 1
                heapq.heappush(heap, (cost + more, count, (inputs, graphs, left)))
    return math.inf


@question("QV.2")
@pytest.mark.parametrize("seed", range(12))
def test_the_cheapest_plan_is_as_cheap_as_any_order_of_operations(seed):
    draw = random.Random(seed)
    layers = seed % 4 + 1
    seconds, inside = ([draw.randint(1, 9) for _ in range(layers)] for _ in range(2))
    least = 2 * 2 + max([inside[0], *(2 + more for more in inside[1:])])
    most = 2 * (layers + 1) + sum(inside)
    for budget in sorted({least, least + 1, (least + most) // 2, most, most + 2}):
        cost, plan = speed.cheapest(seconds, 2, inside, budget)
        assert cost == runs(plan, seconds), "the plan costs what is said"
        assert held_by(plan, 2, inside) <= budget
        assert cost == shortest(seconds, 2, inside, budget), (seconds, inside, budget)
    assert speed.cheapest(seconds, 2, inside, most)[0] == sum(seconds), "nothing runs twice"
    with pytest.raises(ValueError, match=f"{least - 1} bytes or fewer: the least is {least}"):
        speed.cheapest(seconds, 2, inside, least - 1)


@question("QV.2")
def test_a_plan_by_hand():
    assert speed.cheapest([1, 1], 1, [4, 4], 10) == (3, [
        ("forward", 0), ("send", 1), ("output", 1), ("loss", 2), ("backward", 1),
        ("graph", 0), ("backward", 0)])  # fmt: skip
    assert speed.cheapest([1, 1], 1, [4, 4], 11) == (2, speed.keep_all(2))


def test_every_and_ahead_by_hand():
    wanted = ("forward 0, move 1, forward 2, move 3, loss 4, send 2, output 2, graph 3, "
              "backward 3, backward 2, send 0, output 0, graph 1, backward 1, backward 0")
    told = lambda plan: ", ".join(f"{kind} {i}" for kind, i in plan)
    assert told(speed.every(4, 2)) == wanted
    earlier = "send 0, backward 3, backward 2, output 0"
    assert told(speed.ahead(speed.every(4, 2))) == wanted.replace(
        "backward 3, backward 2, send 0, output 0", earlier)
    assert told(speed.ahead(speed.every(3, 1))).endswith(
        "loss 3, graph 2, graph 1, backward 2, graph 0, backward 1, backward 0")


@pytest.mark.parametrize("layers", [1, 2, 7, 12, 34, 35, 64])
@pytest.mark.parametrize("inside", [0, 1, 4, 16])
def test_the_best_k_is_that_of_all_plans_and_near_its_root(layers, inside):
    held = [held_by(speed.every(layers, k), 1, [inside] * layers) for k in range(1, layers + 1)]
    k = speed.best_every(layers, 1, inside)
    assert held[k - 1] == min(held)
    root = math.sqrt(layers / (1 + inside))
    near = {max(1, math.floor(root)), math.ceil(root)}
    assert min(held) <= min(held[k - 1] for k in near if k <= layers) <= 1.1 * min(held) + 1


def test_a_transformer_keeps_every_input_up_to_34_layers():
    assert [speed.best_every(layers, 1, 16) for layers in (34, 35, 36)] == [1, 2, 2]
    nothing = [held_by(speed.every(64, k), 1, [0] * 64) for k in range(1, 65)]
    assert min(nothing) == nothing[8 - 1] == 16, "the square root, where nothing is inside"
    held = [held_by(speed.every(64, k), 1, [16] * 64) for k in (8, speed.best_every(64, 1, 16))]
    assert held == [144, 66]


def gradients(plan, again=True, widths=(8, 16, 8, 24)):
    """(error beside the twin, most bytes held, what a simulation says, state after the run)."""
    group, whole = dist.group.WORLD, speed.weights(widths, CPU)
    n, r = dist.get_world_size(group), group.rank()
    x, goal = speed.random(1, CPU, 2, 2, 8, 16)
    blocks, draw = [speed.Block(*pair, n, r) for pair in whole], speed.draws(CPU)
    with speed.dp.Ledger() as ledger:
        chain = speed.Chain(blocks, group, draw, ledger, again)
        found, most = chain.run(plan, x, lambda out: out * goal)
    right = speed.part(speed.twin(whole, x, goal), n, r)
    inside = [3 * x.nbytes * hidden // 16 // n for hidden in widths]
    return speed.worst(found, right), most, held_by(plan, x.nbytes, inside), draw.get_state()


def all_plans():
    plans = [speed.keep_all(4), *(speed.every(4, k) for k in (1, 2, 3, 4))]
    c, inside = 2 * 8 * 16 * 8, [3 * 2 * 8 * hidden * 8 // 2 for hidden in (8, 16, 8, 24)]
    plans += [speed.cheapest([8, 16, 8, 24], c, inside, budget)[1] for budget in (15000, 18000)]
    return [plan for whole in plans for plan in (whole, speed.ahead(whole))]


@question("QV.1")
def test_gradients_bytes_and_the_masks_after_a_run_are_those_of_any_plan():
    for rank in on_ranks(2, lambda: [gradients(plan) for plan in all_plans()]):
        for error, most, simulated, state in rank:
            assert error < 1e-10
            assert most == simulated
            assert torch.equal(state, rank[0][3]), "as if no block had run again"


@question("QV.1")
def test_without_the_state_the_second_mask_is_another():
    ((error, *_),) = on_ranks(1, gradients, speed.every(4, 1), False)
    assert error > 0.1


def test_a_dropped_unit_is_scaled():
    ones = torch.eye(4, dtype=torch.float64)
    block = speed.Block(ones, ones)
    out = block(torch.full((50, 20, 4), 0.5, dtype=torch.float64), speed.draws(CPU))
    values, counts = out.unique(return_counts=True)
    assert values.tolist() == pytest.approx([0, math.tanh(0.5) / 0.9])
    assert counts[0] / counts.sum() == pytest.approx(0.1, abs=0.02)


def attention(S, d, size, scale=1.0):
    leaves = [x.requires_grad_() for x in speed.random(S, CPU, 3, 2, 3, S, d) * scale]
    goal, hbm = speed.random(S + 1, CPU, 2, 3, S, d), speed.Tiles()
    found = speed.FlashAttention.apply(*leaves, size, hbm)
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=True)
    both = [[out, *torch.autograd.grad(out, leaves, goal)] for out in (found, wanted)]
    return speed.worst(*both), hbm.moved


@question("QV.3")
@pytest.mark.parametrize("S, d, size, scale", [
    (16, 4, 4, 1), (16, 4, 16, 1), (13, 4, 4, 1), (12, 3, 1, 1), (16, 4, 4, 20)])  # fmt: skip
def test_flash_attention_is_torchs_attention_also_for_large_scores(S, d, size, scale):
    error, moved = attention(S, d, size, scale)
    assert error < 1e-10
    if S % size == 0:
        assert moved == 6 * sum(speed.flash_bytes(S, d, size)), "two sequences of three heads"


def test_flash_bytes_by_hand_and_by_tile():
    assert speed.flash_bytes(2, 1, 2, 1) == (2 + 2 + 2 + 2 + 2, 6 + 8 + 2 * 6)
    small, large = (speed.flash_bytes(4096, 64, size)[0] for size in (64, 128))
    assert 0.5 * small < large < 0.53 * small, "twice the size, half the reads"


@pytest.mark.parametrize("chunk", [1, 5, 24, 100])
def test_chunks_of_any_size_give_the_whole_loss(chunk):
    x, w = (speed.random(7, CPU, size, 6).requires_grad_() for size in (24, 50))
    y = torch.arange(24) * 2
    found = speed.ChunkedCrossEntropy.apply(x, w, y, 7, chunk)
    wanted = F.cross_entropy(x @ w.T, y, reduction="sum") / 7
    both = [[loss, *torch.autograd.grad(3 * loss, [x, w])] for loss in (found, wanted)]
    assert speed.worst(*both) < 1e-12


def test_the_meter_counts_what_is_alive_once():
    outside = torch.ones(10)
    with speed.Meter() as meter:
        a = outside + 1
        view = a[:3]
        a.add_(1)
        outside.add_(1)
        assert meter.alive() == 40
        del a
        assert meter.alive() == 40, "a view keeps the whole"
        del view
        b = torch.ones(5)
        assert (meter.alive(), meter.peak) == (20, 40) and len(b) == 5


def test_a_graph_counts_as_torch_explains_it():
    def branches(x):
        x = x + 1 if x.sum() > 0 else x - 1
        return x * 2 if x.max() > 0 else x

    (found,), graphs = speed.graphs_of(branches, (torch.ones(2),))
    explained = torch._dynamo.explain(branches)(torch.ones(2))
    assert len(graphs) == explained.graph_count == 3 and found.tolist() == [4, 4]


def test_every_row_that_needs_no_ranks_holds():
    for row in itertools.chain(speed.fused_rows(CPU), speed.replay_rows(CPU)):
        holds(row)
    for row in speed.fused_rows(CPU, S=48, d=4, size=12, V=200):
        holds(row)


def test_a_replay_reads_what_its_addresses_hold_and_runs_no_python():
    calls, weight = [], torch.full((3,), 2.0)

    def scale(x):
        calls.append(1)
        return (x * weight).view(3, 1)

    replay = speed.Replay(scale, torch.ones(3))
    weight.fill_(5.0)
    assert replay(torch.full((3,), 10.0)).flatten().tolist() == [50, 50, 50] and len(calls) == 1


def test_a_replay_refuses_another_shape_and_a_number():
    replay = speed.Replay(torch.square, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"captured for \[2, 3\], called with \[4, 3\]"):
        replay(torch.ones(4, 3))
    with pytest.raises(ValueError, match="asks for a number"):
        speed.Replay(lambda x: x * x.sum().item(), torch.ones(3))


def test_speed_refuses_what_cannot_work():
    assert "3 ranks do not divide 8 hidden units" in refusal(SCRIPT, "--ranks", 3)
    assert "--text no such file" in refusal(SCRIPT, "--text", "no such file")


@pytest.mark.slow
def test_speed_trains_to_one_loss_with_four_plans(tmp_path):
    done = run_script(SCRIPT, "--steps", 40, torchrun=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("unigram entropy ")[1].splitlines()
    losses, held = zip(*((float(x.split()[-4]), x.split()[-2]) for x in table[2:6]))
    assert max(losses) - min(losses) < 0.01 and losses[0] < float(table[0])
    assert len(set(held)) == 4 and "nothing is timed" in done.stdout
