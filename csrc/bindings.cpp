// Python bindings: the module reads torch tensors through their Python methods; it links neither torch nor libcuda.
//
// The Python side (prefgrpo/ops) checks and allocates. The last argument is the number of threads of a cpu_ function,
// the stream of a cuda_ function. The GIL is released while a kernel runs or is launched.
#include <pybind11/pybind11.h>

#include <string>

#include "kernels.h"

namespace py = pybind11;
using namespace prefgrpo;

// A contiguous tensor of one dtype.
template <class T>
struct Data {
  T* at = nullptr;
};
using F32 = Data<float>;
using F64 = Data<double>;
using I64 = Data<int64_t>;

static py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

static void* pointer_of(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  return PyLong_AsVoidPtr(checked(PyObject_CallMethodNoArgs(tensor.ptr(), name)).ptr());
}

static int64_t stride_of(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("stride");
  static PyObject* const first = PyLong_FromLong(0);
  return PyLong_AsLongLong(checked(PyObject_CallMethodOneArg(tensor.ptr(), name, first)).ptr());
}

static int32_t dtype_of(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("dtype");
  static PyObject* const dtypes[] = {// in the order of DType; kept for ever
                                     py::object(py::module_::import("torch").attr("float32")).release().ptr(),
                                     py::object(py::module_::import("torch").attr("bfloat16")).release().ptr(),
                                     py::object(py::module_::import("torch").attr("float64")).release().ptr()};
  const py::object dtype = checked(PyObject_GetAttr(tensor.ptr(), name));
  for (int32_t k = 0; k < 3; ++k)
    if (dtype.ptr() == dtypes[k]) return k;
  throw py::type_error("expected fp32, bf16 or fp64, got " + py::str(dtype).cast<std::string>());
}

namespace pybind11::detail {
template <>
struct type_caster<View> {
  PYBIND11_TYPE_CASTER(View, const_name("torch.Tensor | None"));
  bool load(handle tensor, bool) {
    if (!tensor.is_none()) value = {static_cast<char*>(pointer_of(tensor)), stride_of(tensor), dtype_of(tensor)};
    return true;
  }
};
template <class T>
struct type_caster<Data<T>> {
  PYBIND11_TYPE_CASTER(Data<T>, const_name("torch.Tensor | None"));
  bool load(handle tensor, bool) {
    if (!tensor.is_none()) value.at = static_cast<T*>(pointer_of(tensor));
    return true;
  }
};
}  // namespace pybind11::detail

static void add_ops(py::module_& m, const std::string& prefix, const Kernels& run) {
  const auto def = [&](const char* name, auto function) {
    m.def((prefix + name).c_str(), function, py::call_guard<py::gil_scoped_release>());
  };
  def("sde_step",
      [&run](int64_t batch, int64_t dim, View x, View v, F32 coef, int64_t rows, I64 index, View y, View eps,
             int64_t seed, I64 sample, I64 step, int64_t offset, F32 logp, View mean, F64 partial, int64_t where) {
        run.sde_step({.batch = batch,
                      .dim = dim,
                      .x = x,
                      .v = v,
                      .coef = coef.at,
                      .rows = rows,
                      .index = index.at,
                      .y = y,
                      .eps = eps,
                      .noise = {static_cast<uint64_t>(seed), sample.at, step.at, offset},
                      .mean = mean,
                      .logp = logp.at,
                      .partial = partial.at},
                     where);
      });
  def("sde_logp", [&run](int64_t batch, int64_t dim, View x, View v, F32 coef, int64_t rows, I64 index, View y,
                         View v_ref, View v_old, F32 logp, F32 kl, F32 log_ratio, F64 partial, int64_t where) {
    run.sde_logp({.batch = batch,
                  .dim = dim,
                  .x = x,
                  .v = v,
                  .coef = coef.at,
                  .rows = rows,
                  .index = index.at,
                  .y = y,
                  .v_ref = v_ref,
                  .v_old = v_old,
                  .logp = logp.at,
                  .kl = kl.at,
                  .log_ratio = log_ratio.at,
                  .partial = partial.at},
                 where);
  });
  def("sde_grad", [&run](int64_t batch, int64_t dim, View x, View v, F32 coef, int64_t rows, I64 index, View y,
                         View v_ref, View v_old, F32 g_logp, F32 g_kl, F32 g_log_ratio, View dv, int64_t where) {
    run.sde_grad({.batch = batch,
                  .dim = dim,
                  .x = x,
                  .v = v,
                  .coef = coef.at,
                  .rows = rows,
                  .index = index.at,
                  .y = y,
                  .v_ref = v_ref,
                  .v_old = v_old,
                  .g_logp = g_logp.at,
                  .g_kl = g_kl.at,
                  .g_log_ratio = g_log_ratio.at,
                  .dv = dv},
                 where);
  });
  def("normal",
      [&run](int64_t batch, int64_t dim, int64_t seed, I64 sample, I64 step, int64_t offset, View out, int64_t where) {
        run.normal({batch, dim, {static_cast<uint64_t>(seed), sample.at, step.at, offset}, out}, where);
      });
  def("policy_loss", [&run](int64_t batch, F32 logp, F32 logp_old, F32 advantage, F32 weight, F32 kl, F32 log_ratio,
                            double low, double high, double adv_clip, double kl_coef, double denominator, F32 loss,
                            F32 metrics, F32 d_log_ratio, F32 d_kl, int64_t where) {
    run.policy_loss({batch, logp.at, logp_old.at, advantage.at, weight.at, kl.at, log_ratio.at, low, high, adv_clip,
                     kl_coef, denominator, loss.at, metrics.at, d_log_ratio.at, d_kl.at},
                    where);
  });
  def("winrate", [&run](int64_t prompts, int64_t group, View wins, View counts, bool use_std, int32_t ddof, double eps,
                        F32 rate, F32 advantage, int64_t where) {
    run.winrate({prompts, group, wins.data, counts.data, wins.dtype, use_std, ddof, eps, rate.at, advantage.at}, where);
  });
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "prefgrpo's compiled kernels; use prefgrpo.ops";
  add_ops(m, "cpu_", cpu_kernels());
  m.attr("isa") = cpu_kernels().name;
#if defined(PG_CUDA)
  add_ops(m, "cuda_", cuda::kernels);
  m.attr("cuda_archs") = PG_CUDA;
  m.def("partials", &cuda::partials_of);
#else
  m.attr("cuda_archs") = "";
#endif
}
