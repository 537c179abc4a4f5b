// torch.ops.prefgrpo.* for programs without Python, such as one that runs an AOTInductor package: they load this module
// after libtorch and get every op on the CPU kernels. In a Python process, prefgrpo.ops registers the same names.
// Torch is called only through its stable C interface (torch/csrc/stable/c/shim.h), declared here as weak symbols, so
// that one binary, built without torch, works with every torch from 2.11. Invariant: schemas and results are those of
// prefgrpo/ops/library.py; inputs that the kernels do not support are errors.
#include <algorithm>
#include <array>
#include <cstdio>
#include <deque>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu.h"

#define PG_WEAK __attribute__((weak))

extern "C" {
struct AtenTensorOpaque;
struct StringOpaque;
struct TorchLibraryOpaque;

PG_WEAK int Py_IsInitialized();
PG_WEAK int32_t aoti_torch_dtype_float32();
PG_WEAK int32_t aoti_torch_dtype_bfloat16();
PG_WEAK int32_t aoti_torch_dtype_float16();
PG_WEAK int32_t aoti_torch_dtype_float64();
PG_WEAK int32_t aoti_torch_dtype_int64();
PG_WEAK int32_t aoti_torch_dtype_bool();
PG_WEAK int32_t aoti_torch_device_type_cpu();
PG_WEAK int32_t aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                         int32_t device, int32_t device_index, AtenTensorOpaque** result);
PG_WEAK int32_t aoti_torch_copy_(AtenTensorOpaque* to, AtenTensorOpaque* from, int32_t non_blocking);
PG_WEAK int32_t aoti_torch_delete_tensor_object(AtenTensorOpaque*);
PG_WEAK int32_t aoti_torch_get_data_ptr(AtenTensorOpaque*, void** result);
PG_WEAK int32_t aoti_torch_get_dim(AtenTensorOpaque*, int64_t* result);
PG_WEAK int32_t aoti_torch_get_dtype(AtenTensorOpaque*, int32_t* result);
PG_WEAK int32_t aoti_torch_get_sizes(AtenTensorOpaque*, int64_t** result);
PG_WEAK int32_t aoti_torch_get_strides(AtenTensorOpaque*, int64_t** result);
PG_WEAK int32_t torch_get_num_threads(uint32_t* result);
PG_WEAK int32_t torch_string_length(StringOpaque*, size_t* result);
PG_WEAK int32_t torch_string_c_str(StringOpaque*, const char** result);
PG_WEAK int32_t torch_delete_string(StringOpaque*);
PG_WEAK int32_t aoti_torch_library_init_def(const char* space, const char* file, uint32_t line, TorchLibraryOpaque**);
PG_WEAK int32_t aoti_torch_library_init_impl(const char* space, const char* key, const char* file, uint32_t line,
                                             TorchLibraryOpaque**);
PG_WEAK int32_t aoti_torch_library_def(TorchLibraryOpaque*, const char* schema);
PG_WEAK int32_t torch_library_impl(TorchLibraryOpaque*, const char* name, void (*)(uint64_t*, uint64_t, uint64_t),
                                   uint64_t version);
}

namespace prefgrpo {
namespace {

constexpr uint64_t kTorch = (uint64_t{2} << 56) | (uint64_t{11} << 48);  // the interface's version, 2.11

void check(int32_t error) {
  if (error) throw std::runtime_error("prefgrpo: a call into torch failed");
}

int32_t torch_dtype(int32_t type) {
  return std::array<int32_t (*)(), 4>{aoti_torch_dtype_float32, aoti_torch_dtype_bfloat16, aoti_torch_dtype_float16,
                                      aoti_torch_dtype_float64}[type]();
}

// The DType of a latent tensor's torch dtype; throws for any other dtype.
int32_t latent_dtype(int32_t type) {
  for (const int32_t known : {kF32, kBF16, kF16})
    if (type == torch_dtype(known)) return known;
  throw std::invalid_argument("prefgrpo: expected fp32, bf16 or fp16; without Python the ops take no other dtype");
}

// An owned tensor, or none.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorOpaque* owned) : handle_(owned) {}
  Tensor(const std::vector<int64_t>& sizes, int32_t type) {  // new, contiguous
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
    check(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), type, aoti_torch_device_type_cpu(), 0,
                                   &handle_));
  }
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_; }
  AtenTensorOpaque* release() { return std::exchange(handle_, nullptr); }
  int32_t dtype() const { return get(aoti_torch_get_dtype, int32_t()); }
  std::vector<int64_t> sizes() const { return dims(aoti_torch_get_sizes); }
  std::vector<int64_t> strides() const { return dims(aoti_torch_get_strides); }
  int64_t size(int64_t d) const { return sizes().at(d); }
  template <class T = float>
  T* data() const {
    return handle_ ? static_cast<T*>(get(aoti_torch_get_data_ptr, static_cast<void*>(nullptr))) : nullptr;
  }
  View view() const { return handle_ ? View{data<void>(), strides()[0], latent_dtype(dtype())} : View(); }

  // Whether it is contiguous; if `packed`, the first dimension may have any stride.
  bool dense(bool packed) const {
    const std::vector<int64_t> n = sizes(), stride = strides();
    int64_t expected = 1;
    for (size_t d = n.size(); d-- > packed;) {
      if (n[d] != 1 && stride[d] != expected) return false;
      expected *= n[d];
    }
    return true;
  }
  Tensor copy(int32_t type) const {
    Tensor result(sizes(), type);
    check(aoti_torch_copy_(result.handle_, handle_, 0));
    return result;
  }

 private:
  template <class T>
  T get(int32_t (*property)(AtenTensorOpaque*, T*), T value) const {
    check(property(handle_, &value));
    return value;
  }
  std::vector<int64_t> dims(int32_t (*property)(AtenTensorOpaque*, int64_t**)) const {
    const int64_t* first = get(property, static_cast<int64_t*>(nullptr));
    return {first, first + get(aoti_torch_get_dim, int64_t())};
  }

  AtenTensorOpaque* handle_ = nullptr;
};

struct Maybe : Tensor {  // an optional argument
  using Tensor::Tensor;
};
using Results = std::vector<Tensor>;

// The inputs of a launch; copies stay alive until it is done.
class Reads {
 public:
  View operator()(const Tensor& t) { return t ? kept(t, t.dtype(), true).view() : View(); }
  const int64_t* integers(const Tensor& t) { return column<int64_t>(t, aoti_torch_dtype_int64()); }
  const double* fp64(const Tensor& t) { return column<double>(t, aoti_torch_dtype_float64()); }
  const uint8_t* flags(const Tensor& t) { return column<uint8_t>(t, aoti_torch_dtype_bool()); }
  const float* fp32(const Tensor& t) { return column<float>(t, aoti_torch_dtype_float32()); }
  const Tensor& real(const Tensor& t) {  // fp32 or fp64, the dtypes of statistics
    return kept(t, t.dtype() == aoti_torch_dtype_float32() ? t.dtype() : aoti_torch_dtype_float64(), false);
  }

 private:
  template <class T>
  const T* column(const Tensor& t, int32_t type) {
    return t ? kept(t, type, false).data<T>() : nullptr;
  }
  const Tensor& kept(const Tensor& t, int32_t type, bool packed) {
    return t.dtype() == type && t.dense(packed) ? t : copies_.emplace_back(t.copy(type));
  }

  std::deque<Tensor> copies_;
};

Tensor like(const Tensor& x, int32_t type) { return Tensor(x.sizes(), type); }
Tensor column(const Tensor& x) { return Tensor({x.size(0)}, aoti_torch_dtype_float32()); }
Tensor absent() { return Tensor({0}, aoti_torch_dtype_bool()); }
View view_if(bool wanted, const Tensor& t) { return wanted ? t.view() : View(); }

template <class... T>
Results all(T&... each) {
  Results results;
  (results.push_back(std::move(each)), ...);
  return results;
}

int32_t threads() {
  uint32_t n;
  check(torch_get_num_threads(&n));
  return static_cast<int32_t>(n);
}

int32_t place(std::initializer_list<const char*> names, const std::string& name) {
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end()) throw std::invalid_argument("prefgrpo: there is no option " + name);
  return static_cast<int32_t>(at - names.begin());
}
int32_t std_mode(const std::string& name) { return place({"group", "global", "none"}, name); }

AffineParams affine(Reads& in, const Tensor& x, const Tensor& v, const Tensor& coef, const Maybe& row,
                    const Maybe& uncond, double scale, bool from_cond, bool rescale) {
  AffineParams p;
  p.batch = x.size(0), p.dim = 1;
  for (const int64_t n : x.sizes()) p.dim *= n;
  p.dim /= std::max<int64_t>(p.batch, 1);
  p.x = in(x), p.v = in(v), p.u = in(uncond);
  p.guidance = static_cast<float>(scale), p.from_cond = from_cond;
  p.rescale_dim = uncond && rescale ? x.sizes().back() : 0;
  if (p.rescale_dim > kMaxRescaleDim)
    throw std::invalid_argument("prefgrpo: without Python a norm is restored over 1024 elements at most");
  p.coef = in.fp32(coef), p.rows = coef.size(0), p.index = in.integers(row), p.threads = threads();
  return p;
}

Results philox_normal(int64_t seed, const Tensor& sample, const Tensor& step, int64_t numel, int64_t offset,
                      int32_t dtype) {
  Reads in;
  NormalParams p;
  Tensor out({sample.size(0), numel}, dtype);
  p.batch = sample.size(0), p.dim = numel, p.out = out.view(), p.threads = threads();
  p.noise = {static_cast<uint64_t>(seed), in.integers(sample), in.integers(step), offset};
  cpu::launch_normal(p, nullptr);
  return all(out);
}

Results affine_step(const Tensor& x, const Tensor& v, const Tensor& coef, const Maybe& row, const Maybe& uncond,
                    double scale, bool from_cond, bool rescale, const Maybe& eps, int64_t seed, const Maybe& sample,
                    const Maybe& step, int64_t offset, int32_t out_dtype, bool want_mean, const Maybe& sigma) {
  Reads in;
  AffineParams p = affine(in, x, v, coef, row, uncond, scale, from_cond, rescale);
  Tensor out = like(x, out_dtype), logp = column(x);
  Tensor mean = want_mean ? like(x, aoti_torch_dtype_float32()) : absent(), x0 = sigma ? like(x, out_dtype) : absent();
  if (sample) p.noise = {static_cast<uint64_t>(seed), in.integers(sample), in.integers(step), offset};
  p.out = out.view(), p.eps = in(eps), p.mean = view_if(want_mean, mean), p.x0 = view_if(bool(sigma), x0);
  p.sigma = in.fp32(sigma), p.logp = logp.data();
  cpu::launch_affine_step(p, nullptr);
  return all(out, logp, mean, x0);
}

Results affine_logp(const Tensor& x, const Tensor& v, const Tensor& x_next, const Tensor& coef, const Maybe& row,
                    const Maybe& uncond, double scale, bool from_cond, bool rescale, const Maybe& v_ref,
                    const Maybe& v_old) {
  Reads in;
  AffineParams p = affine(in, x, v, coef, row, uncond, scale, from_cond, rescale);
  Tensor logp = column(x), kl = v_ref ? column(x) : absent(), guard = v_old ? column(x) : absent();
  p.out = in(x_next), p.v_ref = in(v_ref), p.v_old = in(v_old), p.logp = logp.data();
  p.kl = v_ref ? kl.data() : nullptr, p.guard = v_old ? guard.data() : nullptr;
  cpu::launch_affine_logp(p, nullptr);
  return all(logp, kl, guard);
}

Results affine_grad(const Tensor& x, const Tensor& v, const Tensor& x_next, const Tensor& coef, const Maybe& row,
                    const Maybe& uncond, double scale, bool from_cond, bool rescale, const Maybe& v_ref,
                    const Maybe& v_old, const Maybe& g_logp, const Maybe& g_kl, const Maybe& g_guard) {
  Reads in;
  AffineParams p = affine(in, x, v, coef, row, uncond, scale, from_cond, rescale);
  Tensor dv = like(x, v.dtype()), du = uncond ? like(x, uncond.dtype()) : absent();
  p.out = in(x_next);
  if (g_kl) p.v_ref = in(v_ref);
  if (g_guard) p.v_old = in(v_old);
  p.g_logp = in.fp32(g_logp), p.g_kl = in.fp32(g_kl), p.g_guard = in.fp32(g_guard);
  p.dv = dv.view(), p.du = view_if(bool(uncond), du);
  cpu::launch_affine_grad(p, nullptr);
  return all(dv, du);
}

Results policy_loss(const Tensor& logp, const Tensor& logp_old, const Tensor& advantage, double clip_low,
                    double clip_high, double adv_clip, const Maybe& weight, const Maybe& mask, const Maybe& kl,
                    double kl_coef, const Maybe& log_ratio, std::optional<double> denominator) {
  for (const Tensor* t : {&logp, &logp_old, static_cast<const Tensor*>(&kl), static_cast<const Tensor*>(&log_ratio)})
    if (*t && t->dtype() != aoti_torch_dtype_float32())
      throw std::invalid_argument("prefgrpo: policy_loss without Python takes fp32 alone");
  Reads in;
  PolicyParams p;
  const std::vector<int64_t> sizes = logp.sizes(), steps(sizes.begin() + 1, sizes.end());
  std::vector<int64_t> wide = steps;
  wide.push_back(8);
  const int32_t fp32 = aoti_torch_dtype_float32();
  Tensor loss(steps, fp32), metrics(wide, fp32), d_delta = like(logp, fp32), d_kl = kl ? like(logp, fp32) : absent();
  p.batch = sizes[0];
  for (const int64_t n : steps) p.steps *= n;
  p.logp = in.fp32(logp), p.logp_old = in.fp32(logp_old), p.advantage = in.fp32(advantage);
  p.weight = in.fp32(weight), p.mask = in.flags(mask), p.kl = in.fp32(kl), p.log_ratio = in.fp32(log_ratio);
  p.clip_low = static_cast<float>(clip_low), p.clip_high = static_cast<float>(clip_high);
  p.adv_clip = static_cast<float>(adv_clip), p.kl_coef = static_cast<float>(kl_coef);
  p.denominator = denominator.value_or(0.0);
  p.loss = loss.data(), p.metrics = metrics.data(), p.d_delta = d_delta.data(), p.d_kl = kl ? d_kl.data() : nullptr;
  cpu::launch_policy(p, nullptr);
  return all(loss, metrics, d_delta, d_kl);
}

int32_t real_dtype(const Tensor& t) { return t.dtype() == aoti_torch_dtype_float32() ? kF32 : kF64; }

Results group_advantage(const Tensor& rewards, const Tensor& group_ids, const Tensor& weights,
                        const std::string& combine, const std::string& std, double eps, int64_t ddof, bool rank) {
  Reads in;
  AdvantageParams p;
  const Tensor& r = in.real(rewards);
  Tensor out({r.size(1)}, aoti_torch_dtype_float32());
  p.rewards = r.size(0), p.batch = r.size(1), p.values = r.data<void>(), p.dtype = real_dtype(r);
  p.group = in.integers(group_ids), p.weights = in.fp64(weights), p.rank = rank, p.eps = eps;
  p.combine = place({"weighted_sum", "weighted_advantage_sum", "geometric_mean", "harmonic_mean"}, combine);
  p.std_mode = std_mode(std), p.ddof = static_cast<int32_t>(ddof), p.advantage = out.data();
  cpu::launch_advantage(p, nullptr);
  return all(out);
}

Results winrate_advantage(const Tensor& wins, const Tensor& counts, const std::string& std, double eps, int64_t ddof) {
  Reads in;
  WinrateParams p;
  const Tensor& w = in.real(wins);
  Tensor rate({w.size(0), w.size(1)}, aoti_torch_dtype_float32()), out = like(rate, rate.dtype());
  p.prompts = w.size(0), p.group = w.size(1), p.wins = w.data<void>(), p.dtype = real_dtype(w);
  p.counts = p.dtype == kF32 ? static_cast<const void*>(in.fp32(counts)) : in.fp64(counts);
  p.std_mode = std_mode(std), p.eps = eps, p.ddof = static_cast<int32_t>(ddof);
  p.rate = rate.data(), p.advantage = out.data();
  cpu::launch_winrate(p, nullptr);
  return all(rate, out);
}

// Converts an argument from the 64 bits in which torch passes it; takes ownership of what they point to.
template <class T>
T read(uint64_t bits) {
  if constexpr (std::is_same_v<T, Tensor>) {
    return Tensor(reinterpret_cast<AtenTensorOpaque*>(bits));
  } else if constexpr (std::is_same_v<T, Maybe> || std::is_same_v<T, std::optional<double>>) {
    auto* inner = reinterpret_cast<uint64_t*>(bits);
    if (!inner) return T();
    const uint64_t value = *inner;
    delete inner;
    if constexpr (std::is_same_v<T, Maybe>)
      return Maybe(reinterpret_cast<AtenTensorOpaque*>(value));
    else
      return read<double>(value);
  } else if constexpr (std::is_same_v<T, std::string>) {
    auto* text = reinterpret_cast<StringOpaque*>(bits);
    const char* first;
    size_t length;
    check(torch_string_c_str(text, &first) | torch_string_length(text, &length));
    std::string copy(first, length);
    check(torch_delete_string(text));
    return copy;
  } else {
    T value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }
}

template <auto f>
struct Boxed;
template <class... T, Results (*f)(T...)>
struct Boxed<f> {
  static void call(uint64_t* stack, uint64_t, uint64_t) { unboxed(stack, std::index_sequence_for<T...>()); }

  template <size_t... k>
  static void unboxed(uint64_t* stack, std::index_sequence<k...>) {
    const std::tuple<std::decay_t<T>...> given{read<std::decay_t<T>>(stack[k])...};
    for (Tensor& result : std::apply(f, given)) *stack++ = reinterpret_cast<uint64_t>(result.release());
  }
};

#define PG_PAIR "Tensor? row, Tensor? uncond, float scale, bool from_cond, bool rescale"
#define PG_REPLAY "Tensor x, Tensor v, Tensor x_next, Tensor coef, " PG_PAIR ", Tensor? v_ref, Tensor? v_old"

const struct {
  const char *name, *schema;
  void (*call)(uint64_t*, uint64_t, uint64_t);
} kOps[] = {
    {"philox_normal",
     "(SymInt seed, Tensor sample, Tensor step, SymInt numel, SymInt offset, ScalarType dtype) -> Tensor",
     Boxed<philox_normal>::call},
    {"affine_step",
     "(Tensor x, Tensor v, Tensor coef, " PG_PAIR
     ", Tensor? eps, SymInt seed, Tensor? sample, Tensor? step, SymInt offset, ScalarType out_dtype, bool want_mean, "
     "Tensor? sigma) -> (Tensor, Tensor, Tensor, Tensor)",
     Boxed<affine_step>::call},
    {"affine_logp", "(" PG_REPLAY ") -> (Tensor, Tensor, Tensor)", Boxed<affine_logp>::call},
    {"affine_grad", "(" PG_REPLAY ", Tensor? g_logp, Tensor? g_kl, Tensor? g_guard) -> (Tensor, Tensor)",
     Boxed<affine_grad>::call},
    {"policy_loss",
     "(Tensor logp, Tensor logp_old, Tensor advantage, float clip_low, float clip_high, float adv_clip, "
     "Tensor? weight, Tensor? mask, Tensor? kl, float kl_coef, Tensor? log_ratio, float? denominator) "
     "-> (Tensor, Tensor, Tensor, Tensor)",
     Boxed<policy_loss>::call},
    {"group_advantage",
     "(Tensor rewards, Tensor group_ids, Tensor weights, str combine, str std, float eps, SymInt ddof, bool rank) -> "
     "Tensor",
     Boxed<group_advantage>::call},
    {"winrate_advantage", "(Tensor wins, Tensor counts, str std, float eps, SymInt ddof) -> (Tensor, Tensor)",
     Boxed<winrate_advantage>::call},
};

// Runs when the module is loaded: does nothing in a Python process or without libtorch; else registers the ops.
__attribute__((constructor)) void register_ops() {
  if ((Py_IsInitialized && Py_IsInitialized()) || !torch_library_impl) return;
  TorchLibraryOpaque *names = nullptr, *kernels = nullptr;  // never freed: that would unregister the ops
  int32_t error = aoti_torch_library_init_def("prefgrpo", __FILE__, __LINE__, &names) |
                  aoti_torch_library_init_impl("prefgrpo", "CPU", __FILE__, __LINE__, &kernels);
  for (const auto& op : kOps) {
    error |= error || aoti_torch_library_def(names, (std::string(op.name) + op.schema).c_str());
    error |= error || torch_library_impl(kernels, op.name, op.call, kTorch);
  }
  if (error) std::fprintf(stderr, "prefgrpo: torch refused the ops; its message is above\n");
}

}  // namespace
}  // namespace prefgrpo
