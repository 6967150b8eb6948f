/* SPDX-License-Identifier: Apache-2.0 */
#include "probe/nvml.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define SONAME "libnvidia-ml.so.1"

static bool find_all(nvml *api, char *why, size_t room) {
    const struct {
        const char *name;
        void *into;
        bool needed;
    } functions[] = {
        {"nvmlErrorString", &api->error_string, true},
        {"nvmlInit_v2", &api->init, true},
        {"nvmlShutdown", &api->shutdown, true},
        {"nvmlSystemGetDriverVersion", &api->driver_version, true},
        {"nvmlSystemGetCudaDriverVersion_v2", &api->cuda_version, true},
        {"nvmlDeviceGetCount_v2", &api->count, true},
        {"nvmlDeviceGetHandleByIndex_v2", &api->by_index, true},
        {"nvmlDeviceGetName", &api->name, true},
        {"nvmlDeviceGetUUID", &api->uuid, true},
        {"nvmlDeviceGetMinorNumber", &api->minor_number, true},
        {"nvmlDeviceGetCudaComputeCapability", &api->capability, true},
        {"nvmlDeviceGetMemoryInfo", &api->memory, true},
        {"nvmlDeviceGetMigMode", &api->mig_mode, false},
        {"nvmlDeviceGetMaxMigDeviceCount", &api->mig_count, false},
        {"nvmlDeviceGetMigDeviceHandleByIndex", &api->mig_by_index, false},
        {"nvmlDeviceGetP2PStatus", &api->p2p, false},
        {"nvmlDeviceGetGpuFabricInfo", &api->fabric, false},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(api->library, functions[i].name);
        if (found == NULL && functions[i].needed) {
            snprintf(why, room, "%s has no %s", api->path, functions[i].name);
            return false;
        }
        memcpy(functions[i].into, &found, sizeof found);
    }
    return true;
}

int nvml_open(nvml *api, const char *path, char *why, size_t room) {
    memset(api, 0, sizeof *api);
    snprintf(api->path, sizeof api->path, "%s", path != NULL ? path : SONAME);
    api->library = dlopen(api->path, RTLD_NOW | RTLD_LOCAL);
    if (api->library == NULL) {
        const char *error = dlerror();
        snprintf(why, room, "%.400s", error != NULL ? error : "the library cannot be opened");
        return false;
    }
    if (find_all(api, why, room))
        return true;
    nvml_close(api);
    return false;
}

void nvml_close(nvml *api) {
    if (api->library != NULL)
        dlclose(api->library);
    api->library = NULL;
}
