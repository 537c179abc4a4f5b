// Python bindings: pointers, sizes, dtype enums and a stream; no framework. The Python side checks and allocates.
//
// An op takes (library, …, stream): library 0 = CPU (stream = number of threads), 1 = CUDA (stream = cudaStream_t as an
// integer). What stands between is read in order, each argument as the type of the field that receives it: a View is
// None or (pointer, elements between samples, dtype enum), a pointer is an integer, 0 if absent.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "cpu.h"
#if defined(PG_CUDA)
#include "cuda.h"
#endif

namespace py = pybind11;
using namespace prefgrpo;

namespace {

int64_t integer(PyObject* o) {
  const long long v = PyLong_AsLongLong(o);
  if (v == -1 && PyErr_Occurred()) throw py::error_already_set();
  return v;
}

class Arguments {
 public:
  // All members of a tuple but the last `kept`.
  explicit Arguments(PyObject* given, Py_ssize_t kept = 0) : given_(given) {
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) < kept) throw py::type_error("expected a longer tuple");
    size_ = PyTuple_GET_SIZE(given) - kept;
  }

  template <class T>
  Arguments& operator>>(T& field) {
    read(next(), field);
    return *this;
  }

  Arguments nested() { return Arguments(next()); }
  intptr_t stream() const { return integer(PyTuple_GET_ITEM(given_, size_)); }
  void end() const {
    if (at_ != size_) throw py::type_error("expected " + std::to_string(at_) + " arguments and a stream");
  }

 private:
  PyObject* next() {
    if (at_ == size_) throw py::type_error("expected more than " + std::to_string(size_) + " arguments");
    return PyTuple_GET_ITEM(given_, at_++);
  }

  static void read(PyObject* o, int64_t& field) { field = integer(o); }
  static void read(PyObject* o, int32_t& field) { field = static_cast<int32_t>(integer(o)); }
  static void read(PyObject* o, double& field) {
    field = PyFloat_AsDouble(o);
    if (field == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  }
  static void read(PyObject* o, float& field) {
    double wide;
    read(o, wide);
    field = static_cast<float>(wide);
  }
  template <class T>
  static void read(PyObject* o, T*& field) {
    field = reinterpret_cast<T*>(integer(o));
  }
  static void read(PyObject* o, View& field) {
    if (o != Py_None) Arguments(o) >> field.data >> field.stride >> field.dtype;
  }
  static void read(PyObject* o, NoiseAddress& field) {  // (seed, sample pointer, step pointer, offset) or None
    if (o == Py_None) return;
    Arguments in(o);
    field.seed = PyLong_AsUnsignedLongLongMask(in.next());
    in >> field.sample >> field.step >> field.offset;
  }

  PyObject* given_;
  Py_ssize_t size_, at_ = 0;
};

#if defined(PG_CUDA)
#define PG_LAUNCHES(name) cpu::launch_##name, cuda::launch_##name
#else
#define PG_LAUNCHES(name) cpu::launch_##name, nullptr
#endif

// An op whose arguments `read` puts into Params; it runs without the GIL on the library that is named first.
template <class Params, class Cpu, class Cuda, class Read>
void def(py::module_& m, const char* name, Cpu cpu_launch, [[maybe_unused]] Cuda cuda_launch, Read read) {
  m.def(name, [=](const py::args& given) {
    Arguments in(given.ptr(), 1);
    int64_t library;
    Params p;
    in >> library;
    read(in, p);
    in.end();
    if (library == 0) {
      py::gil_scoped_release release;
      cpu_launch(p, nullptr);
      return;
    }
#if defined(PG_CUDA)
    const char* error = cuda_launch(p, reinterpret_cast<void*>(in.stream()));
    if (error) throw std::runtime_error(std::string("CUDA launch failed: ") + error);
#else
    throw std::runtime_error("this build has no CUDA kernels; rebuild where nvcc is found");
#endif
  });
}

// What the affine ops take first.
Arguments& affine(Arguments& in, AffineParams& p) {
  p.threads = static_cast<int32_t>(in.stream());
  in >> p.batch >> p.dim >> p.x >> p.v >> p.u;
  in.nested() >> p.guidance >> p.from_cond >> p.rescale_dim;
  return in >> p.coef >> p.rows >> p.index;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "prefgrpo's compiled kernels over raw pointers; use prefgrpo.ops";
#if defined(PG_CUDA)
  m.attr("cuda_archs") = PG_CUDA;
  m.def("partials", &cuda::partials_of, "CUDA scratch doubles per sample and plane");
  m.def("fuses_norm", &cuda::fuses_norm, "whether the CUDA kernels restore a norm over so many elements themselves");
  m.def("guide", [](const py::args& given) {  // guided velocity in fp32, or with dv its gradient in c and u
    Arguments in(given.ptr(), 1);
    AffineParams p;
    in >> p.batch >> p.dim >> p.v >> p.u;
    in.nested() >> p.guidance >> p.from_cond >> p.rescale_dim;
    in >> p.eps >> p.out >> p.du;
    in.end();
    p.dv = p.out;
    const char* error =
        (p.eps.data ? cuda::launch_guide_grad : cuda::launch_guide)(p, reinterpret_cast<void*>(in.stream()));
    if (error) throw std::runtime_error(std::string("CUDA launch failed: ") + error);
  });
#else
  m.attr("cuda_archs") = "";
#endif
  m.attr("max_rescale_dim") = kMaxRescaleDim;
  m.def("isa", &cpu::isa, "instruction set of the CPU kernels in use");
  m.def("use_isa", &cpu::use_isa, "choose plain, avx2 or avx512; False if unavailable");
  def<AffineParams>(m, "affine_step", PG_LAUNCHES(affine_step), [](Arguments& in, AffineParams& p) {
    affine(in, p) >> p.out >> p.eps >> p.noise >> p.mean >> p.x0 >> p.sigma >> p.logp >> p.partial >> p.ticket;
  });
  def<AffineParams>(m, "affine_logp", PG_LAUNCHES(affine_logp), [](Arguments& in, AffineParams& p) {
    affine(in, p) >> p.out >> p.v_ref >> p.v_old >> p.logp >> p.kl >> p.guard >> p.partial >> p.ticket;
  });
  def<AffineParams>(m, "affine_grad", PG_LAUNCHES(affine_grad), [](Arguments& in, AffineParams& p) {
    affine(in, p) >> p.out >> p.v_ref >> p.v_old >> p.g_logp >> p.g_kl >> p.g_guard >> p.dv >> p.du;
  });
  def<NormalParams>(m, "normal", PG_LAUNCHES(normal), [](Arguments& in, NormalParams& p) {
    p.threads = static_cast<int32_t>(in.stream());
    in >> p.batch >> p.dim >> p.noise >> p.out;
  });
  def<PolicyParams>(m, "policy", PG_LAUNCHES(policy), [](Arguments& in, PolicyParams& p) {
    in >> p.batch >> p.steps >> p.logp >> p.logp_old >> p.advantage >> p.weight >> p.mask >> p.kl >> p.log_ratio >>
        p.clip_low >> p.clip_high >> p.adv_clip >> p.kl_coef >> p.denominator >> p.loss >> p.metrics >> p.d_delta >>
        p.d_kl;
  });
  def<AdvantageParams>(m, "group_advantage", PG_LAUNCHES(advantage), [](Arguments& in, AdvantageParams& p) {
    in >> p.rewards >> p.batch >> p.values >> p.dtype >> p.group >> p.sorted >> p.weights >> p.combine >> p.std_mode >>
        p.eps >> p.ddof >> p.rank >> p.scratch >> p.advantage;
  });
  def<WinrateParams>(m, "winrate_advantage", PG_LAUNCHES(winrate), [](Arguments& in, WinrateParams& p) {
    in >> p.prompts >> p.group >> p.wins >> p.counts >> p.dtype >> p.std_mode >> p.eps >> p.ddof >> p.rate >>
        p.advantage >> p.scratch;
  });
}
