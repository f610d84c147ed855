"""The judge of 07_5d: its model and its training loop in plain torch, written from the formulas. No
chapter's class or function stands here; weights are a dictionary with 07's names."""

import math

import torch
import torch.nn.functional as F


def names(args):
    """The name of every weight and every router's bias."""
    yield "embedding.weight"
    for k in range(args.layers):
        mixture = args.experts and k % args.every == args.every - 1
        layers = ["norm1.weight", "attention.qkv.weight", "attention.out.weight", "norm2.weight"]
        layers += ["mlp.router.weight", "mlp.router.bias_E", "mlp.experts.gate_up",
                   "mlp.experts.down", "mlp.shared.gate_up", "mlp.shared.down",
                   ] if mixture else ["mlp.gate_up.weight", "mlp.down.weight"]  # fmt: skip
        yield from (f"blocks.{k}.{layer}" for layer in layers)
    yield from ["norm.weight"] if args.tied else ["norm.weight", "head.weight"]


class Twin:
    """The model of one process. w: {name: whole tensor}, of exactly `names(args)`."""

    def __init__(self, args, w):
        assert {*w} == {*names(args)}, {*w} ^ {*names(args)}
        self.args, self.w = args, {name: x.detach().clone() for name, x in w.items()}
        self.trained = {n: x.requires_grad_() for n, x in self.w.items() if "bias_E" not in n}
        self.chosen = {name: 0 for name in self.w if "bias_E" in name}  # tokens, by expert

    def loss(self, x_BS, y_BS):
        """The mean over all labels that are not -100, and the balance losses of the routers."""
        m, valid, total = self.args.micro_batches, (y_BS != -100).sum(), 0
        for x_bS, y_bS in zip(x_BS.chunk(m), y_BS.chunk(m)):
            logits, balance = self.forward(x_bS)
            lost = F.cross_entropy(logits.flatten(0, 1), y_bS.flatten(), reduction="sum")
            total = total + lost / valid
            if self.args.balance == "aux":
                balance = 0.01 * balance / m
                total = total + balance - balance.detach()  # it is trained, and not reported
        return total

    def forward(self, x_bS):
        args, w, balance = self.args, self.w, torch.zeros(())
        h = w["embedding.weight"][x_bS]
        for k in range(args.layers):
            at = f"blocks.{k}"
            h = h + self.attention(norm(h, w[f"{at}.norm1.weight"]), f"{at}.attention")
            u = norm(h, w[f"{at}.norm2.weight"])
            if f"{at}.mlp.router.weight" in w:
                y, part = self.mixture(u.flatten(0, 1), f"{at}.mlp")
                h, balance = h + y.view_as(h), balance + part
            else:
                h = h + swiglu(u, w[f"{at}.mlp.gate_up.weight"], w[f"{at}.mlp.down.weight"])
        head = w["embedding.weight" if args.tied else "head.weight"]
        return F.linear(norm(h, w["norm.weight"]), head), balance

    def attention(self, x, at):
        """Grouped-query attention: query head h looks at key/value head h // (H / K)."""
        H, K, d = self.args.heads, self.args.kv_heads, self.args.width // self.args.heads
        q, k, v = F.linear(x, self.w[f"{at}.qkv.weight"]).split([H * d, K * d, K * d], -1)
        q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in (q, k, v))
        q, k = rotated(q), rotated(k)
        heads = []
        for head in range(H):
            keys, values = (t[:, head // (H // K)] for t in (k, v))
            scores = q[:, head] @ keys.transpose(1, 2) / math.sqrt(d)
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ values)
        return F.linear(torch.cat(heads, -1), self.w[f"{at}.out.weight"])

    def mixture(self, x_ND, at):
        """The output of a mixture of experts, and E · Σ f_i · P_i over all tokens."""
        E, k, w = self.args.experts, self.args.top_k, self.w
        p_NE = F.linear(x_ND, w[f"{at}.router.weight"]).softmax(-1)
        best_Nk = (p_NE + w[f"{at}.router.bias_E"]).topk(k).indices
        mask_NE = F.one_hot(best_Nk, E).sum(1)
        gates_NE = p_NE * mask_NE / (p_NE * mask_NE).sum(-1, keepdim=True)
        y_ND = swiglu(x_ND, w[f"{at}.shared.gate_up"][0], w[f"{at}.shared.down"][0])
        for i in range(E):
            expert = swiglu(x_ND, w[f"{at}.experts.gate_up"][i], w[f"{at}.experts.down"][i])
            y_ND = y_ND + gates_NE[:, i : i + 1] * expert
        if torch.is_grad_enabled():
            self.chosen[f"{at}.router.bias_E"] += mask_NE.sum(0)
        return y_ND, E * (mask_NE.double().mean(0) / k * p_NE.mean(0)).sum()

    def gradients(self, x_BS, y_BS):
        """(loss, {name: gradient}) of a batch."""
        loss = self.loss(x_BS, y_BS)
        return loss.item(), dict(
            zip(self.trained, torch.autograd.grad(loss, [*self.trained.values()]))
        )


def norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def swiglu(x, gate_up, down):
    gate, up = gate_up.chunk(2)
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def rotated(x_bhSd):
    """Elements i and i + d/2 of position p as a complex number, turned by p · 10000^(-2i/d)."""
    S, half = x_bhSd.shape[2], x_bhSd.shape[3] // 2
    rates = 1e4 ** (-torch.arange(half, dtype=x_bhSd.dtype) / half)
    angles = torch.arange(S, dtype=x_bhSd.dtype)[:, None] * rates
    turned = torch.complex(*x_bhSd.split(half, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def train(twin, batches, rates):
    """AdamW as a run of 07 has it; of each step a batch and a learning rate. Returns the losses."""
    params, losses = [*twin.trained.values()], []
    optimizer = torch.optim.AdamW(params, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    for (x_BS, y_BS), rate in zip(batches, rates, strict=True):
        optimizer.zero_grad()
        loss = twin.loss(x_BS, y_BS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for name, chosen_E in twin.chosen.items() if twin.args.balance == "bias" else ():
            step_E = 1e-3 * (chosen_E.double().mean() - chosen_E).sign()
            twin.w[name] += step_E - step_E.mean()
        twin.chosen = dict.fromkeys(twin.chosen, 0)
        losses.append(loss.item())
    return losses
