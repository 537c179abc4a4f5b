// Win rates and group-relative advantages on the CPU.
//
//   A = (r − mean of its group) / (std + eps)
//
// fp64, two passes; members of a group are visited in index order. Invariant: a missing value (NaN) enters no
// statistic, and a constant group gives exactly 0.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "params.h"

namespace prefgrpo {
namespace advantage {

constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

inline double load(const void* data, int32_t dtype, int64_t k) {
  return dtype == kF64 ? static_cast<const double*>(data)[k] : static_cast<const float*>(data)[k];
}

struct Moments {
  int64_t n = 0;
  double mean = 0, low = 0, high = 0;
};

// Moments of values[order[from … to)] without missing values.
inline Moments moments(const double* values, const int64_t* order, int64_t from, int64_t to) {
  Moments m;
  m.low = std::numeric_limits<double>::infinity(), m.high = -m.low;
  double sum = 0;
  for (int64_t k = from; k < to; ++k) {
    const double v = values[order[k]];
    if (std::isnan(v)) continue;
    ++m.n, sum += v, m.low = std::min(m.low, v), m.high = std::max(m.high, v);
  }
  m.mean = sum / static_cast<double>(std::max<int64_t>(m.n, 1));
  return m;
}

inline double deviation(const double* values, const int64_t* order, int64_t from, int64_t to, const Moments& m,
                        int ddof) {
  double squares = 0;
  for (int64_t k = from; k < to; ++k) {
    const double v = values[order[k]];
    if (!std::isnan(v)) squares += (v - m.mean) * (v - m.mean);
  }
  return std::sqrt(squares / static_cast<double>(std::max<int64_t>(m.n - ddof, 1)));
}

// Replaces members' values by their ranks in [0, 1]; tied values get their mean rank.
inline void rank(double* values, const int64_t* order, int64_t from, int64_t to) {
  std::vector<double> old;
  for (int64_t k = from; k < to; ++k)
    if (!std::isnan(values[order[k]])) old.push_back(values[order[k]]);
  if (old.empty()) return;
  std::sort(old.begin(), old.end());
  const double top = std::max<double>(static_cast<double>(old.size()) - 1.0, 1.0);
  for (int64_t k = from; k < to; ++k) {
    double& v = values[order[k]];
    if (std::isnan(v)) continue;
    const auto range = std::equal_range(old.begin(), old.end(), v);
    v = 0.5 * static_cast<double>((range.first - old.begin()) + (range.second - old.begin() - 1)) / top;
  }
}

struct Groups {
  std::vector<int64_t> order, start;  // samples sorted by group; start of each group, then the end of the last
};

inline Groups groups_of(const int64_t* id, int64_t batch) {
  Groups g;
  g.order.resize(batch);
  for (int64_t i = 0; i < batch; ++i) g.order[i] = i;
  if (!std::is_sorted(id, id + batch))
    std::stable_sort(g.order.begin(), g.order.end(), [id](int64_t i, int64_t j) { return id[i] < id[j]; });
  for (int64_t k = 0; k < batch; ++k)
    if (k == 0 || id[g.order[k]] != id[g.order[k - 1]]) g.start.push_back(k);
  g.start.push_back(batch);
  return g;
}

// out += weight · normalised(values)
inline void normalise(const AdvantageParams& p, const Groups& g, double* values, double weight, double* out) {
  const int64_t groups = static_cast<int64_t>(g.start.size()) - 1, *order = g.order.data();
  if (p.rank)
    for (int64_t k = 0; k < groups; ++k) rank(values, order, g.start[k], g.start[k + 1]);
  double global_std = 0;
  if (p.std_mode == kStdGlobal)
    global_std = deviation(values, order, 0, p.batch, moments(values, order, 0, p.batch), p.ddof);
  for (int64_t k = 0; k < groups; ++k) {
    const int64_t from = g.start[k], to = g.start[k + 1];
    const Moments m = moments(values, order, from, to);
    if (!(m.high > m.low)) continue;
    double scale = global_std + p.eps;
    if (p.std_mode == kStdGroup) scale = deviation(values, order, from, to, m, p.ddof) + p.eps;
    if (p.std_mode == kStdNone) scale = 1.0;
    for (int64_t j = from; j < to; ++j) {
      const double v = values[order[j]];
      if (!std::isnan(v)) out[order[j]] += weight * ((v - m.mean) / scale);
    }
  }
}

// One value per sample from its rewards; NaN where a reward of non-zero weight is missing.
inline double combine_rewards(const AdvantageParams& p, int64_t i) {
  double sum = 0, total = 0;
  for (int64_t r = 0; r < p.rewards; ++r) {
    const double w = p.weights[r], v = load(p.values, p.dtype, r * p.batch + i);
    if (w == 0) continue;
    total += w;
    sum += p.combine == kGeometric ? w * std::log(v) : p.combine == kHarmonic ? w / v : w * v;
    if (p.combine != kWeightedSum && v < 0) return kMissing;
  }
  if (p.combine == kGeometric) return std::exp(sum / total);
  return p.combine == kHarmonic ? total / sum : sum;
}

inline void group(const AdvantageParams& p) {
  const Groups g = groups_of(p.group, p.batch);
  std::vector<double> value(p.batch), out(p.batch, 0.0);
  std::vector<char> missing(p.batch, 0);
  bool any = false;
  for (int64_t r = 0; r < p.rewards; ++r) {
    if (p.weights[r] == 0) continue;
    any = true;
    for (int64_t i = 0; i < p.batch; ++i) missing[i] |= std::isnan(load(p.values, p.dtype, r * p.batch + i));
  }
  if (any && p.combine != kWeightedAdvantageSum) {
    for (int64_t i = 0; i < p.batch; ++i) value[i] = missing[i] ? kMissing : combine_rewards(p, i);
    normalise(p, g, value.data(), 1.0, out.data());
  } else if (any) {
    for (int64_t r = 0; r < p.rewards; ++r) {
      if (p.weights[r] == 0) continue;
      for (int64_t i = 0; i < p.batch; ++i) value[i] = missing[i] ? kMissing : load(p.values, p.dtype, r * p.batch + i);
      normalise(p, g, value.data(), p.weights[r], out.data());
    }
  }
  for (int64_t i = 0; i < p.batch; ++i) p.advantage[i] = static_cast<float>(out[i]);
}

inline void winrate(const WinrateParams& p) {
  const int64_t n = p.prompts * p.group;
  std::vector<double> rate(n), out(n, 0.0);
  Groups g;
  g.order.resize(n);
  for (int64_t i = 0; i < n; ++i) {
    double wins = 0, count = 0;
    for (int64_t j = 0; j < p.group; ++j) {
      wins += load(p.wins, p.dtype, i * p.group + j);
      count += load(p.counts, p.dtype, i * p.group + j);
    }
    g.order[i] = i;
    p.rate[i] = static_cast<float>(count > 0 ? wins / count : kMissing);
    rate[i] = p.rate[i];  // rounded: sums in another order differ in fp64
  }
  for (int64_t k = 0; k <= p.prompts; ++k) g.start.push_back(k * p.group);
  AdvantageParams a;
  a.batch = n, a.std_mode = p.std_mode, a.ddof = p.ddof, a.eps = p.eps;
  if (p.group) normalise(a, g, rate.data(), 1.0, out.data());
  for (int64_t i = 0; i < n; ++i) p.advantage[i] = static_cast<float>(out[i]);
}

}  // namespace advantage
}  // namespace prefgrpo
