// The functions of the driver and of cuBLASLt that cuDNN looks up when it plans for a GPU that is not there. Loading
// machine code succeeds; whatever needs a device fails.
#define FAILS(name) int name(void) { return 100; }
#define SUCCEEDS(name) int name(void) { return 0; }
#define RETURNS(name) \
    int name(void** handle) { \
        *handle = (void*)16; \
        return 0; \
    }

int cuDriverGetVersion(int* version) {
    *version = 12090;
    return 0;
}
unsigned long cublasLtGetVersion(void) { return 120900; }

RETURNS(cuKernelGetFunction)
RETURNS(cuLibraryGetKernel)
RETURNS(cuLibraryLoadData)
RETURNS(cuModuleGetFunction)
RETURNS(cuModuleLoadData)
RETURNS(cuModuleLoadDataEx)
SUCCEEDS(cuCtxGetCurrent)
SUCCEEDS(cuCtxGetDevice)
SUCCEEDS(cuCtxGetLimit)
SUCCEEDS(cuCtxPopCurrent)
SUCCEEDS(cuCtxPushCurrent)
SUCCEEDS(cuFuncGetAttribute)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuKernelGetAttribute)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuLibraryLoadFromFile)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuModuleGetGlobal_v2)
SUCCEEDS(cuModuleLoadFatBinary)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
SUCCEEDS(cuOccupancyMaxPotentialClusterSize)
FAILS(cuDeviceGet)
FAILS(cuDeviceGetAttribute)
FAILS(cuDeviceGetCount)
FAILS(cuDevicePrimaryCtxRelease)
FAILS(cuDevicePrimaryCtxReset)
FAILS(cuDevicePrimaryCtxRetain)
FAILS(cuGetErrorName)
FAILS(cuGetErrorString)
FAILS(cuInit)
FAILS(cuLaunchCooperativeKernel)
FAILS(cuLaunchKernel)
FAILS(cuLaunchKernelEx)
FAILS(cuLinkAddData)
FAILS(cuLinkAddData_v2)
FAILS(cuLinkAddFile_v2)
FAILS(cuLinkComplete)
FAILS(cuLinkCreate)
FAILS(cuLinkCreate_v2)
FAILS(cuLinkDestroy)
FAILS(cuMemcpyDtoH_v2)
FAILS(cuStreamGetCtx)
FAILS(cuStreamGetGreenCtx)
FAILS(cuStreamSynchronize)
FAILS(cuTensorMapEncodeIm2col)
FAILS(cuTensorMapEncodeTiled)
