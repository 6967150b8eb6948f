/* SPDX-License-Identifier: Apache-2.0
 *
 * api_open LIBRARY - opens a libep_overlap.so and makes a world with it, for
 * test_api_library.sh.  Status 0, or 1 with the library's error line.
 */
#include <dlfcn.h>
#include <stdio.h>

#include "ep_overlap.h"

int main(int argc, char **argv) {
    epo_status (*create)(int, epo_world **) = NULL;
    const char *(*error)(void) = NULL;
    epo_world *world = NULL;
    void *lib = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (lib == NULL) {
        fprintf(stderr, "usage: api_open LIBRARY; %s\n", argc == 2 ? dlerror() : "no library");
        return 2;
    }
    *(void **)&create = dlsym(lib, "epo_world_create");
    *(void **)&error = dlsym(lib, "epo_error");
    if (create == NULL || error == NULL)
        return 2;
    if (create(2, &world) != EPO_OK) {
        fprintf(stderr, "%s\n", error());
        return 1;
    }
    return world != NULL ? 0 : 2;
}
