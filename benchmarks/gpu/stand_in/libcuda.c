// A CUDA driver that starts nothing. It loads the cubins that Triton compiles and reads from them
// what a launch of each kernel takes; it refuses what a GPU's driver refuses, with the same errors;
// and it hands every other launch to a callback.
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define MOST_PARAMETERS 512
// Attributes in the section .nv.info.<kernel> of a cubin.
#define REQUIRED_BLOCK 0x10  // .reqntid: the only block that the kernel may be started with
#define PARAMETER 0x17

typedef struct Module Module;

typedef struct Function {
  struct Function *next;
  Module *module;
  char *name;
  int shared;  // the most dynamic shared memory of a launch
  unsigned block[3];
  int parameters, sizes[MOST_PARAMETERS];
} Function;

struct Module {
  const unsigned char *image;
  int loaded;
};

// What the callback gets; benchmarks/gpu/stand_in/__init__.py has the same fields.
typedef struct {
  const Function *function;
  const char *name;
  unsigned grid[3], block[3], shared, attributes;
  CUstream stream;
  int parameters;
  const int *sizes;
  void **values;
} Launch;

typedef CUresult (*Callback)(const Launch *);

static const struct {
  int major, minor, shared_of_block, shared_of_multiprocessor, multiprocessors;
} device = {9, 0, 232448, 233472, 132};
static Callback callback;
static Function *functions;  // all that there ever were: a handle is never used twice
static long launches, loaded;

void stand_in_set_callback(Callback given) { callback = given; }
long stand_in_launches(void) { return launches; }
long stand_in_loaded(void) { return loaded; }

// ------------------------------------------------------------------------- modules and functions

static Function *find(CUfunction handle) {
  Function *function = functions;
  while (function && function != (Function *)handle) function = function->next;
  return function && function->module->loaded ? function : NULL;
}

// The size of each parameter and the required block. 0 where the cubin has no such kernel.
static int read_kernel(Function *function) {
  const unsigned char *image = function->module->image;
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
  const char *names = (const char *)image + sections[header->e_shstrndx].sh_offset;
  for (int i = 0; i < header->e_shnum; i++) {
    const char *name = names + sections[i].sh_name;
    if (strncmp(name, ".nv.info.", 9) || strcmp(name + 9, function->name)) continue;
    const unsigned char *at = image + sections[i].sh_offset, *end = at + sections[i].sh_size;
    while (at < end) {  // {format, attribute, 16 bits}; in format 4 these count bytes that follow
      unsigned attribute = at[1], follow = at[0] == 4 ? at[2] | at[3] << 8 : 0;
      unsigned words[3] = {0};
      at += 4;
      memcpy(words, at, follow < sizeof words ? follow : sizeof words);
      at += follow;
      if (attribute == REQUIRED_BLOCK) memcpy(function->block, words, sizeof words);
      if (attribute == PARAMETER) {  // index, {ordinal, offset}, bits of which 18 .. 31 are the size
        int ordinal = words[1] & 0xffff;
        if (ordinal >= MOST_PARAMETERS) return 0;
        function->sizes[ordinal] = words[2] >> 18;
        if (function->parameters <= ordinal) function->parameters = ordinal + 1;
      }
    }
    return 1;
  }
  return 0;
}

CUresult cuModuleLoadData(CUmodule *handle, const void *image) {
  if (memcmp(image, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
  Module *module = calloc(1, sizeof *module);
  module->image = image, module->loaded = 1;
  __sync_fetch_and_add(&loaded, 1);
  *handle = (CUmodule)module;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule handle) {
  Module *module = (Module *)handle;
  if (!__sync_bool_compare_and_swap(&module->loaded, 1, 0)) return CUDA_ERROR_INVALID_HANDLE;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *handle, CUmodule module, const char *name) {
  Function *function = calloc(1, sizeof *function);
  function->module = (Module *)module, function->name = strdup(name), function->shared = 49152;
  if (!function->module->loaded) return CUDA_ERROR_INVALID_HANDLE;
  if (!read_kernel(function)) return CUDA_ERROR_NOT_FOUND;
  do function->next = functions;
  while (!__sync_bool_compare_and_swap(&functions, function->next, function));
  *handle = (CUfunction)function;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
  if (!find(handle)) return CUDA_ERROR_INVALID_HANDLE;
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  Function *function = find(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) return CUDA_SUCCESS;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  if (value < 0 || value > device.shared_of_block) return CUDA_ERROR_INVALID_VALUE;
  function->shared = value;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) {
  return find(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction f, const CUlaunchConfig *config) {
  *count = 1;
  return find(f) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// -------------------------------------------------------------------------------------- launches

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction handle, void **parameters,
                          void **extra) {
  const CUlaunchConfig c = *config;
  const Function *function = find(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (!c.gridDimX || !c.gridDimY || !c.gridDimZ) return CUDA_ERROR_INVALID_VALUE;
  if (c.gridDimX > 2147483647u || c.gridDimY > 65535 || c.gridDimZ > 65535)
    return CUDA_ERROR_INVALID_VALUE;
  unsigned long threads = (unsigned long)c.blockDimX * c.blockDimY * c.blockDimZ;
  if (!threads || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
  const unsigned *block = function->block;
  if (block[0] && (c.blockDimX != block[0] || c.blockDimY != block[1] || c.blockDimZ != block[2]))
    return CUDA_ERROR_INVALID_VALUE;
  if (c.sharedMemBytes > (unsigned)function->shared) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < function->parameters; i++)
    if (!parameters[i]) return CUDA_ERROR_INVALID_VALUE;
  __sync_fetch_and_add(&launches, 1);
  Launch launch = {function, function->name,
                   {c.gridDimX, c.gridDimY, c.gridDimZ}, {c.blockDimX, c.blockDimY, c.blockDimZ},
                   c.sharedMemBytes, c.numAttrs, c.hStream,
                   function->parameters, function->sizes, parameters};
  return callback ? callback(&launch) : CUDA_SUCCESS;
}

// ----------------------------------------------------------------------- one device, one context

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *given, int ordinal) {
  return *given = ordinal, ordinal ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *given) { return *given = 0, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)&device, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice given) {
  return cuCtxGetCurrent(context);
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 1 << 20, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return *(CUdeviceptr *)value = pointer, CUDA_SUCCESS;  // the memory of the host
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice given) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = device.major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = device.minor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = device.shared_of_block;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = device.shared_of_multiprocessor;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = device.multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 1;  // clocks and bus: nothing is timed
  }
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  switch (error) {
    case CUDA_SUCCESS: *text = "no error"; break;
    case CUDA_ERROR_INVALID_VALUE: *text = "invalid argument"; break;
    case CUDA_ERROR_INVALID_DEVICE: *text = "invalid device ordinal"; break;
    case CUDA_ERROR_INVALID_IMAGE: *text = "device kernel image is invalid"; break;
    case CUDA_ERROR_INVALID_HANDLE: *text = "invalid resource handle"; break;
    case CUDA_ERROR_NOT_FOUND: *text = "named symbol not found"; break;
    case CUDA_ERROR_LAUNCH_FAILED: *text = "unspecified launch failure"; break;
    default: return *text = NULL, CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

// A tensor map is here its address, rank, sizes, strides in bytes and tile, the last dimension first.
CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (rank < 1 || rank > 5 || (cuuint64_t)address % 16) return CUDA_ERROR_INVALID_VALUE;
  cuuint64_t *words = memset(map, 0, sizeof *map);
  words[0] = (cuuint64_t)address, words[1] = rank;
  for (unsigned i = 0; i < rank; i++) {
    if (!dims[i] || dims[i] > 1ull << 32 || !box[i] || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    if (i && (!strides[i - 1] || strides[i - 1] % 16 || strides[i - 1] >> 40))
      return CUDA_ERROR_INVALID_VALUE;
    words[2 + i] = dims[i], words[7 + i] = i ? strides[i - 1] : 0;
    ((cuuint32_t *)(words + 12))[i] = box[i];
  }
  return CUDA_SUCCESS;
}
