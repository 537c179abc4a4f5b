"""GRPO's loss and gradient by autograd through the formulas of the papers, in fp64 and without the project's ops."""

import torch


def plain_formula(one, batches, advantage, trained=None, weight=lambda schedule, k: 1.0, guard=False):
    """(loss, gradient, ratios) of a trainer's update at its current weights, sample by sample; the log-probs stored in
    the batches are the old ones.

    advantage: [P, G]. trained: bool [P, G], the samples that count (None: all). weight: of the loss of step k. guard:
    GRPO-Guard's ratio, from the stored velocities.
    """
    train, rollout = one.config.train, one.config.rollout
    low, high = 1 - train.clip_range, 1 + train.clip_range
    total, ratios = torch.zeros((), dtype=torch.float64), []
    for batch in batches:
        at = (batch.slots, batch.members)
        rows = slice(None) if trained is None else trained[at].nonzero().flatten()
        for step in batch.transitions:
            k = step.k
            a, b, s, w, const = batch.schedule.coef[k].double()
            sigma = batch.schedule.sigmas[k].expand(len(batch.slots))
            v = one.adapter.velocity(step.x, sigma, batch.condition, rollout).double()
            mean = a * step.x.double() + b * v
            logp = w * (step.x_next.double() - mean).square().flatten(1).mean(1) + const
            ratio = torch.exp(logp - step.logp.double())
            if guard:
                old = a * step.x.double() + b * step.v.double()
                ratio = torch.exp(((step.x_next.double() - old) / s * (mean - old)).flatten(1).mean(1))
            adv = advantage[at].double().clamp(-train.adv_clip_max, train.adv_clip_max)
            loss = weight(batch.schedule, k) * torch.maximum(-adv * ratio, -adv * ratio.clamp(low, high))
            if train.kl_coef:
                with torch.no_grad(), one.adapter.reference():
                    ref = one.adapter.velocity(step.x, sigma, batch.condition, rollout).double()
                loss = loss + train.kl_coef * (b * (v - ref)).square().flatten(1).mean(1) / (2 * s * s)
            total = total + loss[rows].sum()
            ratios += ratio.detach()[rows].tolist()
    gradient = torch.autograd.grad(total / len(ratios), one.policy.params)
    return float(total.detach()) / len(ratios), torch.cat([g.flatten() for g in gradient]), ratios
