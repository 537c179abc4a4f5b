// Python bindings: the module reads torch tensors through their Python methods; it links neither torch nor libcuda.
//
// The Python side (prefgrpo/ops) checks and allocates. A function takes the fields of its struct in kernels.h, then the
// number of threads (cpu_) or the stream (cuda_). The GIL is released while a kernel runs or is launched.
#include <pybind11/pybind11.h>

#include <string>

#include "kernels.h"

namespace py = pybind11;
using namespace prefgrpo;

// The data of a tensor of one dtype.
struct Pointer {
  void* at = nullptr;
  template <class T>
  operator T*() const {
    return static_cast<T*>(at);
  }
};

static py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

static int64_t number(py::handle tensor, const char* method) { return tensor.attr(method)().cast<int64_t>(); }

static void* pointer_of(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  const uintptr_t address = checked(PyObject_CallMethodNoArgs(tensor.ptr(), name)).cast<uintptr_t>();
  // A tensor without memory (fake, functional, meta) points at its offset from null; memory begins far above.
  if (address < uintptr_t{1} << 31 && number(tensor, "numel") != 0 &&
      address == static_cast<uintptr_t>(number(tensor, "storage_offset") * number(tensor, "element_size")))
    throw py::type_error(
        "expected a tensor in memory, got one without data: " + py::repr(py::type::of(tensor)).cast<std::string>() +
        " on " + py::str(tensor.attr("device")).cast<std::string>());
  return reinterpret_cast<void*>(address);
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
    if (!tensor.is_none()) value = {static_cast<char*>(pointer_of(tensor)), dtype_of(tensor)};
    return true;
  }
};
template <>
struct type_caster<Pointer> {
  PYBIND11_TYPE_CASTER(Pointer, const_name("torch.Tensor | None"));
  bool load(handle tensor, bool) {
    if (!tensor.is_none()) value.at = pointer_of(tensor);
    return true;
  }
};
}  // namespace pybind11::detail

// `Fields` are the types of the fields of Params, in order.
template <class... Fields, class Params>
static void def(py::module_& m, const std::string& name, void (*run)(const Params&, int64_t)) {
  const auto call = [run](Fields... fields, int64_t where) { run(Params{fields...}, where); };
  m.def(name.c_str(), call, py::call_guard<py::gil_scoped_release>());
}

static void add_ops(py::module_& m, const std::string& where, const Kernels& run) {
  using I = int64_t;
  using P = Pointer;
  def<I, I, View, View, P, I, P, View, View, I, P, P, P, View, P>(m, where + "sde_step", run.sde_step);
  def<I, I, View, View, P, I, P, View, View, View, P, P, P, P>(m, where + "sde_logp", run.sde_logp);
  def<I, I, View, View, P, I, P, View, View, View, P, P, P, View>(m, where + "sde_grad", run.sde_grad);
  def<I, I, I, P, P, View>(m, where + "normal", run.normal);
  def<I, P, P, P, P, P, double, double, double, double, double, P, P, P, P>(m, where + "policy_loss", run.policy_loss);
  def<I, I, View, View, bool, I, double, P, P>(m, where + "winrate", run.winrate);
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "prefgrpo's compiled kernels; use prefgrpo.ops";
  add_ops(m, "cpu_", cpu::kernels);
#if defined(PG_X86)  // cpu.cpp is compiled for these
  m.attr("cpu_runs") = static_cast<bool>(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
#else
  m.attr("cpu_runs") = true;
#endif
#if defined(PG_CUDA)
  add_ops(m, "cuda_", cuda::kernels);
  m.attr("cuda_archs") = PG_CUDA;
  m.def("partials", &cuda::partials_of);
#else
  m.attr("cuda_archs") = "";
#endif
}
