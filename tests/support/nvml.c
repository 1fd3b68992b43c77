/* The driver's management library as far as it is used here, by us, Ray and PyTorch. The environment says what it has:
 * FAKE_NVML is "FREE_GIB,FREE_GIB,..." for as many GPUs of 80 GiB, or "broken". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    unsigned long long total, free, used;
} Memory;

static const unsigned long long GIB = 1ull << 30, FIRST = 0x7f1234567000ull; /* a handle, which an int would cut */
static const char *described(void) { return getenv("FAKE_NVML"); }

static int num_users = 0;
int num_initialized(void) { return num_users; } /* of this library alone */

int nvmlInit_v2(void) {
    if (!strcmp(described(), "broken")) return 9; /* NVML_ERROR_DRIVER_NOT_LOADED */
    num_users++;
    return 0;
}
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) { return flags ? 2 : nvmlInit_v2(); }
int nvmlShutdown(void) {
    num_users--;
    return 0;
}
const char *nvmlErrorString(int code) { return code == 9 ? "driver not loaded" : "another error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = *described() != 0;
    for (const char *c = described(); *c; c++) *count += *c == ',';
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(FIRST + index);
    return 0;
}

static unsigned long long index_of(void *device) { return (unsigned long long)device - FIRST; }
static int is_known(void *device) { return index_of(device) < 64; }

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    return is_known(device) ? snprintf(name, length, "NVIDIA H100 %llu", index_of(device)) < 0 : 2;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    const char *format = "GPU-%c0000000-0000-0000-0000-00000000000%llu";
    return is_known(device) ? snprintf(uuid, length, format, "ab"[index_of(device) % 2], index_of(device)) < 0 : 2;
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    const char *at = described();
    if (!is_known(device)) return 2; /* NVML_ERROR_INVALID_ARGUMENT */
    for (unsigned long long i = 0; i < index_of(device); i++) at = strchr(at, ',') + 1;
    memory->total = 80 * GIB;
    memory->free = strtoull(at, NULL, 10) * GIB;
    memory->used = memory->total - memory->free;
    return 0;
}
