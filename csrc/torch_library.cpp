// torch.ops.prefgrpo.* for programs without Python, such as one that runs an AOTInductor package: they link this library
// or load it, and find each op served by the CPU kernels. CMakeLists.txt builds it against the program's libtorch
// (PREFGRPO_TORCH). Where there is Python, prefgrpo.ops registers the same names.
// Invariant: schemas and results are those of prefgrpo/ops/library.py; what the kernels do not take is an error.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <string_view>
#include <tuple>

#include "cpu.h"

namespace {

using namespace prefgrpo;
using at::Tensor;
using Maybe = std::optional<Tensor>;

int32_t code(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return kF32;
    case at::kBFloat16:
      return kBF16;
    case at::kHalf:
      return kF16;
    default:
      TORCH_CHECK(false, "prefgrpo: expected fp32, bf16 or fp16, got ", type, "; without Python there is no other");
  }
}

View view(const Tensor& t) { return {t.data_ptr(), t.stride(0), code(t.scalar_type())}; }
View view(const Maybe& t) { return t ? view(*t) : View(); }

// What a launch reads, each sample contiguous; copies live until the launch is over.
class Reads {
 public:
  View operator()(const Maybe& t) {
    if (!t) return {};
    const bool packed = t->is_contiguous() || (t->size(0) > 0 && t->select(0, 0).is_contiguous());
    return view(kept_.emplace_back(packed ? *t : t->contiguous()));
  }

  template <class T>
  const T* as(const Maybe& t) {  // in another dtype if need be
    if (!t) return nullptr;
    return kept_.emplace_back(t->to(c10::CppTypeToScalarType<T>::value).contiguous()).template const_data_ptr<T>();
  }

  const float* fp32(const Maybe& t) {
    TORCH_CHECK(!t || t->scalar_type() == at::kFloat, "prefgrpo: expected fp32, got ", t->scalar_type());
    return as<float>(t);
  }

 private:
  std::deque<Tensor> kept_;
};

Tensor full(const Tensor& x, at::ScalarType type) { return at::empty(x.sizes(), x.options().dtype(type)); }
Tensor column(const Tensor& x) { return at::empty({x.size(0)}, x.options().dtype(at::kFloat)); }
Tensor or_absent(const Maybe& t, const Tensor& x) { return t ? *t : at::empty({0}, x.options().dtype(at::kBool)); }
float* data(const Maybe& t) { return t ? t->data_ptr<float>() : nullptr; }

template <size_t n>
int32_t place(const std::array<std::string_view, n>& names, std::string_view name) {
  const auto at = std::find(names.begin(), names.end(), name);
  TORCH_CHECK(at != names.end(), "prefgrpo: no option ", name);
  return static_cast<int32_t>(at - names.begin());
}
int32_t std_mode(std::string_view name) {
  return place(std::array<std::string_view, 3>{"group", "global", "none"}, name);
}

AffineParams affine(Reads& in, const Tensor& x, const Tensor& v, const Tensor& coef, const Maybe& row,
                    const Maybe& uncond, double scale, bool from_cond, bool rescale) {
  AffineParams p;
  p.batch = x.size(0), p.dim = x.numel() / std::max<int64_t>(p.batch, 1);
  p.x = in(x), p.v = in(v), p.u = in(uncond);
  p.guidance = static_cast<float>(scale), p.from_cond = from_cond, p.rescale_dim = uncond && rescale ? x.size(-1) : 0;
  TORCH_CHECK(p.rescale_dim <= kMaxRescaleDim, "prefgrpo: a norm is restored over ", kMaxRescaleDim, " elements at most");
  p.coef = in.as<float>(coef), p.rows = coef.size(0), p.index = in.as<int64_t>(row);
  p.threads = at::get_num_threads();
  return p;
}

Tensor philox_normal(int64_t seed, const Tensor& sample, const Tensor& step, int64_t numel, int64_t offset,
                     at::ScalarType dtype) {
  Reads in;
  NormalParams p;
  const Tensor out = at::empty({sample.size(0), numel}, sample.options().dtype(dtype));
  p.batch = sample.size(0), p.dim = numel, p.out = view(out), p.threads = at::get_num_threads();
  p.noise = {static_cast<uint64_t>(seed), in.as<int64_t>(sample), in.as<int64_t>(step), offset};
  cpu::launch_normal(p, nullptr);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> affine_step(
    const Tensor& x, const Tensor& v, const Tensor& coef, const Maybe& row, const Maybe& uncond, double scale,
    bool from_cond, bool rescale, const Maybe& eps, int64_t seed, const Maybe& sample, const Maybe& step,
    int64_t offset, at::ScalarType out_dtype, bool want_mean, const Maybe& sigma) {
  Reads in;
  AffineParams p = affine(in, x, v, coef, row, uncond, scale, from_cond, rescale);
  const Tensor out = full(x, out_dtype), logp = column(x);
  const Maybe mean = want_mean ? Maybe(full(x, at::kFloat)) : Maybe(), x0 = sigma ? Maybe(full(x, out_dtype)) : Maybe();
  if (sample)
    p.noise = {static_cast<uint64_t>(seed), in.as<int64_t>(sample), in.as<int64_t>(step), offset};
  p.out = view(out), p.eps = in(eps), p.mean = view(mean), p.x0 = view(x0), p.sigma = in.as<float>(sigma);
  p.logp = data(logp);
  cpu::launch_affine_step(p, nullptr);
  return {out, logp, or_absent(mean, x), or_absent(x0, x)};
}

std::tuple<Tensor, Tensor, Tensor> affine_logp(const Tensor& x, const Tensor& v, const Tensor& x_next,
                                               const Tensor& coef, const Maybe& row, const Maybe& uncond, double scale,
                                               bool from_cond, bool rescale, const Maybe& v_ref, const Maybe& v_old) {
  Reads in;
  AffineParams p = affine(in, x, v, coef, row, uncond, scale, from_cond, rescale);
  const Tensor logp = column(x);
  const Maybe kl = v_ref ? Maybe(column(x)) : Maybe(), guard = v_old ? Maybe(column(x)) : Maybe();
  p.out = in(x_next), p.v_ref = in(v_ref), p.v_old = in(v_old);
  p.logp = data(logp), p.kl = data(kl), p.guard = data(guard);
  cpu::launch_affine_logp(p, nullptr);
  return {logp, or_absent(kl, x), or_absent(guard, x)};
}

std::tuple<Tensor, Tensor> affine_grad(const Tensor& x, const Tensor& v, const Tensor& x_next, const Tensor& coef,
                                       const Maybe& row, const Maybe& uncond, double scale, bool from_cond,
                                       bool rescale, const Maybe& v_ref, const Maybe& v_old, const Maybe& g_logp,
                                       const Maybe& g_kl, const Maybe& g_guard) {
  Reads in;
  AffineParams p = affine(in, x, v, coef, row, uncond, scale, from_cond, rescale);
  const Tensor dv = full(x, v.scalar_type());
  const Maybe du = uncond ? Maybe(full(x, uncond->scalar_type())) : Maybe();
  p.out = in(x_next), p.v_ref = in(g_kl ? v_ref : Maybe()), p.v_old = in(g_guard ? v_old : Maybe());
  p.g_logp = in.as<float>(g_logp), p.g_kl = in.as<float>(g_kl), p.g_guard = in.as<float>(g_guard);
  p.dv = view(dv), p.du = view(du);
  cpu::launch_affine_grad(p, nullptr);
  return {dv, or_absent(du, x)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> policy_loss(const Tensor& logp, const Tensor& logp_old,
                                                       const Tensor& advantage, double clip_low, double clip_high,
                                                       double adv_clip, const Maybe& weight, const Maybe& mask,
                                                       const Maybe& kl, double kl_coef, const Maybe& log_ratio,
                                                       std::optional<double> denominator) {
  Reads in;
  PolicyParams p;
  const at::IntArrayRef steps = logp.sizes().slice(1);
  std::vector<int64_t> wide = steps.vec();
  wide.push_back(8);
  const auto options = logp.options().dtype(at::kFloat);
  const Tensor loss = at::empty(steps, options), metrics = at::empty(wide, options), d_delta = full(logp, at::kFloat);
  const Maybe d_kl = kl ? Maybe(full(logp, at::kFloat)) : Maybe();
  p.batch = logp.size(0), p.steps = loss.numel();
  p.logp = in.fp32(logp), p.logp_old = in.fp32(logp_old), p.advantage = in.fp32(advantage);
  p.weight = in.fp32(weight), p.kl = in.fp32(kl), p.log_ratio = in.fp32(log_ratio);
  p.mask = reinterpret_cast<const uint8_t*>(in.as<bool>(mask));
  p.clip_low = static_cast<float>(clip_low), p.clip_high = static_cast<float>(clip_high);
  p.adv_clip = static_cast<float>(adv_clip), p.kl_coef = static_cast<float>(kl_coef);
  p.denominator = denominator.value_or(0.0);
  p.loss = data(loss), p.metrics = data(metrics), p.d_delta = data(d_delta), p.d_kl = data(d_kl);
  cpu::launch_policy(p, nullptr);
  return {loss, metrics, d_delta, or_absent(d_kl, logp)};
}

// fp32 or fp64, the dtypes of statistics.
Tensor real(const Tensor& t) {
  return (t.scalar_type() == at::kFloat ? t : t.to(at::kDouble)).contiguous();
}
int32_t real_code(const Tensor& t) { return t.scalar_type() == at::kFloat ? kF32 : kF64; }

Tensor group_advantage(const Tensor& rewards, const Tensor& group_ids, const Tensor& weights, std::string_view combine,
                       std::string_view std, double eps, int64_t ddof, bool rank) {
  Reads in;
  AdvantageParams p;
  const Tensor r = real(rewards), out = at::empty({r.size(1)}, r.options().dtype(at::kFloat));
  p.rewards = r.size(0), p.batch = r.size(1), p.values = r.data_ptr(), p.dtype = real_code(r);
  p.group = in.as<int64_t>(group_ids), p.weights = in.as<double>(weights);
  constexpr std::array<std::string_view, 4> combines{"weighted_sum", "weighted_advantage_sum", "geometric_mean",
                                                     "harmonic_mean"};
  p.combine = place(combines, combine), p.std_mode = std_mode(std);
  p.ddof = static_cast<int32_t>(ddof), p.rank = rank, p.eps = eps, p.advantage = data(out);
  cpu::launch_advantage(p, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> winrate_advantage(const Tensor& wins, const Tensor& counts, std::string_view std, double eps,
                                             int64_t ddof) {
  WinrateParams p;
  const Tensor w = real(wins), n = counts.to(w.scalar_type()).contiguous();
  const Tensor rate = at::empty({w.size(0), w.size(1)}, w.options().dtype(at::kFloat)), out = at::empty_like(rate);
  p.prompts = w.size(0), p.group = w.size(1), p.wins = w.data_ptr(), p.counts = n.data_ptr(), p.dtype = real_code(w);
  p.std_mode = std_mode(std), p.eps = eps, p.ddof = static_cast<int32_t>(ddof);
  p.rate = data(rate), p.advantage = data(out);
  cpu::launch_winrate(p, nullptr);
  return {rate, out};
}

#define PG_PAIR "Tensor? row, Tensor? uncond, float scale, bool from_cond, bool rescale"
#define PG_REPLAY "Tensor x, Tensor v, Tensor x_next, Tensor coef, " PG_PAIR ", Tensor? v_ref, Tensor? v_old"

TORCH_LIBRARY(prefgrpo, m) {
  const auto on_cpu = [](auto f) { return torch::dispatch(c10::DispatchKey::CPU, f); };
  m.def(
      "philox_normal(SymInt seed, Tensor sample, Tensor step, SymInt numel, SymInt offset, ScalarType dtype) -> Tensor",
      on_cpu(TORCH_FN(philox_normal)));
  m.def("affine_step(Tensor x, Tensor v, Tensor coef, " PG_PAIR
        ", Tensor? eps, SymInt seed, Tensor? sample, Tensor? step, SymInt offset, ScalarType out_dtype, "
        "bool want_mean, Tensor? sigma) -> (Tensor, Tensor, Tensor, Tensor)",
        on_cpu(TORCH_FN(affine_step)));
  m.def("affine_logp(" PG_REPLAY ") -> (Tensor, Tensor, Tensor)", on_cpu(TORCH_FN(affine_logp)));
  m.def("affine_grad(" PG_REPLAY ", Tensor? g_logp, Tensor? g_kl, Tensor? g_guard) -> (Tensor, Tensor)",
        on_cpu(TORCH_FN(affine_grad)));
  m.def(
      "policy_loss(Tensor logp, Tensor logp_old, Tensor advantage, float clip_low, float clip_high, float adv_clip, "
      "Tensor? weight, Tensor? mask, Tensor? kl, float kl_coef, Tensor? log_ratio, float? denominator) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      on_cpu(TORCH_FN(policy_loss)));
  m.def(
      "group_advantage(Tensor rewards, Tensor group_ids, Tensor weights, str combine, str std, float eps, "
      "SymInt ddof, bool rank) -> Tensor",
      on_cpu(TORCH_FN(group_advantage)));
  m.def("winrate_advantage(Tensor wins, Tensor counts, str std, float eps, SymInt ddof) -> (Tensor, Tensor)",
        on_cpu(TORCH_FN(winrate_advantage)));
}

}  // namespace
