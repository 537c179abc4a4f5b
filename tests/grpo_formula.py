"""GRPO's loss and gradient by autograd through the formulas of the papers, in fp64 and without the project's ops."""

import torch


def plain_formula(one, batches, advantage):
    """(loss, gradient, ratios) of a trainer's update at its current weights, sample by sample; the log-probs stored in
    the batches are the old ones. advantage: [P, G]."""
    train, rollout = one.config.train, one.config.rollout
    low, high = 1 - train.clip_range, 1 + train.clip_range
    total, ratios = torch.zeros((), dtype=torch.float64), []
    for batch in batches:
        for step in batch.steps:
            k = int(step.index[0])
            a, b, s, w, const = batch.schedule.coef[k].double()
            sigma = batch.schedule.sigmas[k].expand(len(batch.slots))
            v = one.adapter.velocity(step.x, sigma, batch.condition, rollout).double()
            error = step.x_next.double() - a * step.x.double() - b * v
            logp = w * error.square().flatten(1).mean(1) + const
            ratio = torch.exp(logp - step.logp.double())
            adv = advantage[batch.slots, batch.members].double().clamp(-train.adv_clip_max, train.adv_clip_max)
            loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(low, high))
            if train.kl_coef:
                with torch.no_grad(), one.adapter.reference():
                    ref = one.adapter.velocity(step.x, sigma, batch.condition, rollout).double()
                loss = loss + train.kl_coef * (b * (v - ref)).square().flatten(1).mean(1) / (2 * s * s)
            total = total + loss.sum()
            ratios += ratio.detach().tolist()
    gradient = torch.autograd.grad(total / len(ratios), one.policy.params)
    return float(total.detach()) / len(ratios), torch.cat([g.flatten() for g in gradient]), ratios
