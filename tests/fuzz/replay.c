/* SPDX-License-Identifier: Apache-2.0
 *
 * Gives files to a fuzz target, without a fuzzer.
 */
#include "fuzz.h"

int main(int argc, char **argv) {
    static uint8_t bytes[1 << 20];
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "re");
        if (f == NULL) {
            perror(argv[i]);
            return 1;
        }
        size_t n = fread(bytes, 1, sizeof bytes, f);
        fclose(f);
        LLVMFuzzerTestOneInput(bytes, n);
        for (size_t cut = 0; cut < n; cut += 1 + n / 50) /* and cut off in many places */
            LLVMFuzzerTestOneInput(bytes, cut);
    }
    printf("%d files\n", argc - 1);
    return argc > 1 ? 0 : 1;
}
