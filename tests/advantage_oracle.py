"""Group advantages in NumPy, group by group, as the papers define them."""

import numpy as np


def normalised(r, ids, std="group", eps=1e-4, ddof=0, rank=False):
    """(r − group mean) / (group std + eps) for r [B], NaN = missing; 0 for missing values and constant groups."""
    r, out, ok = r.copy(), np.zeros(len(r)), ~np.isnan(r)
    groups = [m for g in np.unique(ids) if (m := (ids == g) & ok).any()]
    for m in groups if rank else ():
        v = r[m]
        r[m] = [((v < x).sum() + 0.5 * ((v == x).sum() - 1)) / max(len(v) - 1, 1) for x in v]
    whole = r[ok].std() * np.sqrt(ok.sum() / max(ok.sum() - ddof, 1)) if ok.any() else 0.0
    for m in groups:
        if np.ptp(r[m]) > 0:
            own = np.sqrt(((r[m] - r[m].mean()) ** 2).sum() / max(m.sum() - ddof, 1))
            out[m] = (r[m] - r[m].mean()) / {"group": own + eps, "global": whole + eps, "none": 1.0}[std]
    return out


def advantage(r, ids, w, combine="weighted_sum", **options):
    """Advantages [B] from rewards [R, B] and weights [R]; a reward of weight 0 is ignored."""
    r, w = r[w != 0], w[w != 0]
    r = np.where(np.isnan(r).any(0), np.nan, r)
    if combine == "weighted_advantage_sum":
        return sum(wi * normalised(ri, ids, **options) for wi, ri in zip(w, r, strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = {
            "weighted_sum": lambda: w @ r,
            "geometric_mean": lambda: np.exp(w @ np.log(r) / w.sum()).astype(np.float32).astype(np.float64),
        }[combine]()
    return normalised(value, ids, **options)
