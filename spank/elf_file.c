/* SPDX-License-Identifier: Apache-2.0 */
#include "elf_file.h"

#include <elf.h>
#include <endian.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#define HEADERS_MAX 128
#if BYTE_ORDER == LITTLE_ENDIAN
#define OUR_ORDER ELFDATA2LSB
#else
#define OUR_ORDER ELFDATA2MSB
#endif

static bool read_at(int fd, void *to, size_t length, uint64_t offset) {
    return offset < INT64_MAX && pread(fd, to, length, (off_t)offset) == (ssize_t)length;
}

static void read_interpreter(int fd, uint64_t offset, uint64_t size, struct ep_elf *elf) {
    if (size > sizeof elf->interpreter - 1)
        size = sizeof elf->interpreter - 1;
    if (!read_at(fd, elf->interpreter, (size_t)size, offset))
        size = 0;
    elf->interpreter[size] = '\0';
}

/* The program header table says whether there is a loader; a position
 * independent file without one is a library or a static program, which the
 * dynamic section's DF_1_PIE would tell: both get no preload as a program. */
static void read_headers64(int fd, struct ep_elf *elf) {
    Elf64_Ehdr head;
    Elf64_Phdr program;
    if (!read_at(fd, &head, sizeof head, 0) || head.e_phentsize != sizeof program)
        return;
    elf->kind = head.e_type == ET_DYN ? EP_ELF_LIBRARY : EP_ELF_STATIC;
    for (unsigned i = 0; i < head.e_phnum && i < HEADERS_MAX; i++)
        if (read_at(fd, &program, sizeof program, head.e_phoff + i * sizeof program) &&
            program.p_type == PT_INTERP) {
            elf->kind = EP_ELF_DYNAMIC;
            read_interpreter(fd, program.p_offset, program.p_filesz, elf);
        }
}

static void read_headers32(int fd, struct ep_elf *elf) {
    Elf32_Ehdr head;
    Elf32_Phdr program;
    if (!read_at(fd, &head, sizeof head, 0) || head.e_phentsize != sizeof program)
        return;
    elf->kind = head.e_type == ET_DYN ? EP_ELF_LIBRARY : EP_ELF_STATIC;
    for (unsigned i = 0; i < head.e_phnum && i < HEADERS_MAX; i++)
        if (read_at(fd, &program, sizeof program, (uint64_t)head.e_phoff + i * sizeof program) &&
            program.p_type == PT_INTERP) {
            elf->kind = EP_ELF_DYNAMIC;
            read_interpreter(fd, program.p_offset, program.p_filesz, elf);
        }
}

static void read_script(const char *line, size_t length, struct ep_elf *elf) {
    size_t start = 2;
    while (start < length && (line[start] == ' ' || line[start] == '\t'))
        start++;
    size_t end = start;
    while (end < length && strchr(" \t\n", line[end]) == NULL && line[end] != '\0')
        end++;
    if (end == start || end - start >= sizeof elf->interpreter)
        return;
    memcpy(elf->interpreter, line + start, end - start);
    elf->interpreter[end - start] = '\0';
    elf->kind = EP_ELF_SCRIPT;
}

void ep_elf_read(int fd, struct ep_elf *elf) {
    unsigned char head[256] = {0};
    memset(elf, 0, sizeof *elf);
    ssize_t got = pread(fd, head, sizeof head, 0);
    if (got > 2 && head[0] == '#' && head[1] == '!')
        read_script((const char *)head, (size_t)got, elf);
    if (got < (ssize_t)sizeof(Elf32_Ehdr) || memcmp(head, ELFMAG, SELFMAG) != 0)
        return;
    elf->kind = EP_ELF_STATIC; /* unless its headers say more */
    elf->bits = head[EI_CLASS];
    elf->order = head[EI_DATA];
    /* e_machine has the same place in both classes. */
    uint16_t machine;
    memcpy(&machine, head + offsetof(Elf64_Ehdr, e_machine), sizeof machine);
    elf->machine = elf->order == OUR_ORDER ? machine : (uint16_t)(machine << 8 | machine >> 8);
    if (elf->order == OUR_ORDER && elf->bits == ELFCLASS64)
        read_headers64(fd, elf);
    else if (elf->order == OUR_ORDER && elf->bits == ELFCLASS32)
        read_headers32(fd, elf);
}

bool ep_elf_fits(const struct ep_elf *one, const struct ep_elf *other) {
    return one->bits == other->bits && one->order == other->order && one->machine == other->machine;
}
