// Python bindings: the module reads torch tensors through their Python methods; it links neither torch nor libcuda.
//
// The Python side (prefgrpo/ops) checks and allocates. A name with cpu_ takes the number of threads as its last argument,
// one with cuda_ the stream as an integer. The GIL is released while a kernel runs or is launched.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "cpu.h"
#if defined(PG_CUDA)
#include "cuda.h"
#endif

namespace py = pybind11;
using namespace prefgrpo;

template <class T>
struct Data {  // a contiguous tensor
  T* at = nullptr;
};

static void* pointer_of(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  const auto address = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), name));
  if (!address) throw py::error_already_set();
  return PyLong_AsVoidPtr(address.ptr());
}

static py::handle torch_dtype(const char* name) {
  return py::object(py::module_::import("torch").attr(name)).release();  // kept for ever
}

static int32_t dtype_of(py::handle tensor) {
  static const py::handle known[] = {torch_dtype("float32"), torch_dtype("bfloat16"), torch_dtype("float64")};
  const py::object dtype = tensor.attr("dtype");
  for (int32_t k = 0; k < 3; ++k)
    if (dtype.is(known[k])) return k;
  throw py::type_error("expected fp32, bf16 or fp64, got " + py::str(dtype).cast<std::string>());
}

namespace pybind11 {
namespace detail {
template <>
struct type_caster<View> {
  PYBIND11_TYPE_CASTER(View, const_name("torch.Tensor | None"));
  bool load(handle tensor, bool) {
    if (tensor.is_none()) return true;
    value.data = static_cast<char*>(pointer_of(tensor));
    value.stride = tensor.attr("stride")(0).cast<int64_t>();
    value.dtype = dtype_of(tensor);
    return true;
  }
};
template <class T>
struct type_caster<Data<T>> {
  PYBIND11_TYPE_CASTER(Data<T>, const_name("torch.Tensor | None"));
  bool load(handle tensor, bool) {
    value.at = tensor.is_none() ? nullptr : static_cast<T*>(pointer_of(tensor));
    return true;
  }
};
}  // namespace detail
}  // namespace pybind11

using F32 = Data<float>;
using I64 = Data<int64_t>;

static SdeParams sde_params(int64_t batch, int64_t dim, View x, View v, F32 coef, int64_t rows, I64 index, View y) {
  SdeParams p;
  p.batch = batch;
  p.dim = dim;
  p.x = x;
  p.v = v;
  p.coef = coef.at;
  p.rows = rows;
  p.index = index.at;
  p.y = y;
  return p;
}

static PhiloxNoise noise_of(int64_t seed, I64 sample, I64 step, int64_t offset) {
  return {static_cast<uint64_t>(seed), sample.at, step.at, offset};
}

// Adds the ops to the module; `run` is where they run: a struct with one function per op, and a prefix for their names.
template <class Run>
static void add_ops(py::module_& m, const std::string& prefix) {
  const auto def = [&](const char* name, auto function) {
    m.def((prefix + name).c_str(), function, py::call_guard<py::gil_scoped_release>());
  };
  def("sde_step", [](int64_t batch, int64_t dim, View x, View v, F32 coef, int64_t rows, I64 index, View y, View eps,
                     int64_t seed, I64 sample, I64 step, int64_t offset, F32 logp, View mean, Data<double> partial,
                     int64_t where) {
    SdeParams p = sde_params(batch, dim, x, v, coef, rows, index, y);
    p.eps = eps;
    p.noise = noise_of(seed, sample, step, offset);
    p.logp = logp.at;
    p.mean = mean;
    p.partial = partial.at;
    Run::sde_step(p, where);
  });
  def("sde_logp", [](int64_t batch, int64_t dim, View x, View v, F32 coef, int64_t rows, I64 index, View y, View v_ref,
                     View v_old, F32 logp, F32 kl, F32 log_ratio, Data<double> partial, int64_t where) {
    SdeParams p = sde_params(batch, dim, x, v, coef, rows, index, y);
    p.v_ref = v_ref;
    p.v_old = v_old;
    p.logp = logp.at;
    p.kl = kl.at;
    p.log_ratio = log_ratio.at;
    p.partial = partial.at;
    Run::sde_logp(p, where);
  });
  def("sde_grad", [](int64_t batch, int64_t dim, View x, View v, F32 coef, int64_t rows, I64 index, View y, View v_ref,
                     View v_old, F32 g_logp, F32 g_kl, F32 g_log_ratio, View dv, int64_t where) {
    SdeParams p = sde_params(batch, dim, x, v, coef, rows, index, y);
    p.v_ref = v_ref;
    p.v_old = v_old;
    p.g_logp = g_logp.at;
    p.g_kl = g_kl.at;
    p.g_log_ratio = g_log_ratio.at;
    p.dv = dv;
    Run::sde_grad(p, where);
  });
  def("normal", [](int64_t batch, int64_t dim, int64_t seed, I64 sample, I64 step, int64_t offset, View out,
                   int64_t where) { Run::normal({batch, dim, noise_of(seed, sample, step, offset), out}, where); });
  def("policy_loss", [](int64_t batch, F32 logp, F32 logp_old, F32 advantage, F32 weight, F32 kl, F32 log_ratio,
                        double low, double high, double adv_clip, double kl_coef, double denominator, F32 loss,
                        F32 metrics, F32 d_log_ratio, F32 d_kl, int64_t where) {
    Run::policy_loss({batch, logp.at, logp_old.at, advantage.at, weight.at, kl.at, log_ratio.at, low, high, adv_clip,
                      kl_coef, denominator, loss.at, metrics.at, d_log_ratio.at, d_kl.at},
                     where);
  });
  def("winrate", [](int64_t prompts, int64_t group, View wins, View counts, bool use_std, int64_t ddof, double eps,
                    F32 rate, F32 advantage, int64_t where) {
    Run::winrate({prompts, group, wins.data, counts.data, wins.dtype, use_std, static_cast<int32_t>(ddof), eps, rate.at,
                  advantage.at},
                 where);
  });
}

struct OnCpu {
  static void sde_step(const SdeParams& p, int64_t n) { cpu_kernels().sde_step(p, static_cast<int>(n)); }
  static void sde_logp(const SdeParams& p, int64_t n) { cpu_kernels().sde_logp(p, static_cast<int>(n)); }
  static void sde_grad(const SdeParams& p, int64_t n) { cpu_kernels().sde_grad(p, static_cast<int>(n)); }
  static void normal(const NormalParams& p, int64_t n) { cpu_kernels().normal(p, static_cast<int>(n)); }
  static void policy_loss(const PolicyParams& p, int64_t) { cpu_kernels().policy_loss(p); }
  static void winrate(const WinrateParams& p, int64_t) { cpu_kernels().winrate(p); }
};

#if defined(PG_CUDA)
struct OnCuda {
  static void check(const char* error) {
    if (error) throw std::runtime_error(std::string("CUDA launch failed: ") + error);
  }
  static void* stream(int64_t where) { return reinterpret_cast<void*>(where); }
  static void sde_step(const SdeParams& p, int64_t where) { check(cuda::sde_step(p, stream(where))); }
  static void sde_logp(const SdeParams& p, int64_t where) { check(cuda::sde_logp(p, stream(where))); }
  static void sde_grad(const SdeParams& p, int64_t where) { check(cuda::sde_grad(p, stream(where))); }
  static void normal(const NormalParams& p, int64_t where) { check(cuda::normal(p, stream(where))); }
  static void policy_loss(const PolicyParams& p, int64_t where) { check(cuda::policy_loss(p, stream(where))); }
  static void winrate(const WinrateParams& p, int64_t where) { check(cuda::winrate(p, stream(where))); }
};
#endif

PYBIND11_MODULE(_C, m) {
  m.doc() = "prefgrpo's compiled kernels; use prefgrpo.ops";
  add_ops<OnCpu>(m, "cpu_");
  m.attr("isa") = cpu_kernels().isa;
#if defined(PG_CUDA)
  add_ops<OnCuda>(m, "cuda_");
  m.attr("cuda_archs") = PG_CUDA;
  m.def("partials", &cuda::partials_of);
#else
  m.attr("cuda_archs") = "";
#endif
}
