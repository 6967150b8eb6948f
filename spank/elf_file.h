/* SPDX-License-Identifier: Apache-2.0
 *
 * elf_file.h - what the dynamic loader will make of a file.
 */
#ifndef EPO_SPANK_ELF_FILE_H
#define EPO_SPANK_ELF_FILE_H

#include <stdbool.h>
#include <stdint.h>

enum ep_elf_kind {
    EP_ELF_NOT,     /* something else, or unreadable */
    EP_ELF_SCRIPT,  /* "#!": `interpreter` runs it */
    EP_ELF_STATIC,  /* a program that loads no libraries */
    EP_ELF_DYNAMIC, /* a program with `interpreter` as its loader */
    EP_ELF_LIBRARY  /* a shared object without a loader of its own */
};

struct ep_elf {
    enum ep_elf_kind kind;
    unsigned char bits;    /* ELFCLASS32, ELFCLASS64 */
    unsigned char order;   /* ELFDATA2LSB, ELFDATA2MSB */
    uint16_t machine;      /* EM_* */
    char interpreter[256]; /* "" when there is none */
};

/* Reads the head of an open file; never trusts a number in it. */
void ep_elf_read(int fd, struct ep_elf *elf);
/* Same class, byte order and machine. */
bool ep_elf_fits(const struct ep_elf *one, const struct ep_elf *other);

#endif
