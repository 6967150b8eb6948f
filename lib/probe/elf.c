/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* memmem */
#include "probe/elf.h"

#include <ctype.h>
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADERS_MAX 256
#define DYNAMIC_MAX 1024
#define CHUNK 262144

static bool read_at(int fd, uint64_t offset, void *into, size_t bytes) {
    return offset < ((uint64_t)1 << 50) && pread(fd, into, bytes, (off_t)offset) == (ssize_t)bytes;
}

/* This machine's kind of file: 64 bits, its byte order. */
static int open_elf(const char *path, Elf64_Ehdr *head) {
    const uint16_t one = 1;
    const unsigned char order = *(const unsigned char *)&one == 1 ? ELFDATA2LSB : ELFDATA2MSB;
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
        read_at(fd, 0, head, sizeof *head) && memcmp(head->e_ident, ELFMAG, SELFMAG) == 0 &&
        head->e_ident[EI_CLASS] == ELFCLASS64 && head->e_ident[EI_DATA] == order)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

/* Where the address lies in the file. */
static bool find_offset(const Elf64_Phdr *headers, unsigned count, uint64_t address,
                        uint64_t *offset) {
    for (unsigned i = 0; i < count; i++)
        if (headers[i].p_type == PT_LOAD && address >= headers[i].p_vaddr &&
            address - headers[i].p_vaddr < headers[i].p_filesz) {
            *offset = headers[i].p_offset + (address - headers[i].p_vaddr);
            return true;
        }
    return false;
}

static bool read_search(int fd, const Elf64_Ehdr *head, char *text, size_t room, bool *before) {
    Elf64_Phdr headers[HEADERS_MAX];
    unsigned count = head->e_phnum < HEADERS_MAX ? head->e_phnum : HEADERS_MAX;
    uint64_t strings = 0, name = 0, offset;
    bool found = false;
    if (head->e_phentsize != sizeof *headers ||
        !read_at(fd, head->e_phoff, headers, count * sizeof *headers))
        return false;
    for (unsigned i = 0; i < count; i++) {
        if (headers[i].p_type != PT_DYNAMIC)
            continue;
        for (unsigned k = 0; k < DYNAMIC_MAX; k++) {
            Elf64_Dyn entry;
            if ((k + 1) * sizeof entry > headers[i].p_filesz ||
                !read_at(fd, headers[i].p_offset + k * sizeof entry, &entry, sizeof entry) ||
                entry.d_tag == DT_NULL)
                break;
            if (entry.d_tag == DT_STRTAB)
                strings = entry.d_un.d_ptr;
            /* with both, the loader takes DT_RUNPATH alone */
            if (entry.d_tag == DT_RUNPATH || (entry.d_tag == DT_RPATH && !found)) {
                *before = entry.d_tag == DT_RPATH;
                name = entry.d_un.d_val;
                found = true;
            }
        }
    }
    if (!found || !find_offset(headers, count, strings + name, &offset))
        return false;
    ssize_t got = pread(fd, text, room - 1, (off_t)offset);
    if (got <= 0)
        return false;
    text[got] = '\0';
    return strlen(text) < (size_t)got;
}

bool probe_elf_search(epo_probe_task *task, const char *path, char *folders, size_t room,
                      bool *before) {
    Elf64_Ehdr head;
    char text[4096], own[PROBE_PATH];
    int fd = open_elf(path, &head);
    if (fd < 0)
        return false;
    bool found =
        task->bytes_left > sizeof text && read_search(fd, &head, text, sizeof text, before);
    close(fd);
    if (!found || realpath(path, own) == NULL)
        return false;
    probe_up(own);
    size_t used = 0;
    for (const char *at = text; *at != '\0';) {
        bool is_origin = strncmp(at, "$ORIGIN", 7) == 0 || strncmp(at, "${ORIGIN}", 9) == 0;
        int need = is_origin ? snprintf(folders + used, room - used, "%s", own)
                             : snprintf(folders + used, room - used, "%c", *at);
        if (need < 0 || (size_t)need >= room - used)
            return false;
        used += (size_t)need;
        at += !is_origin ? 1 : at[1] == '{' ? 9 : 7;
    }
    return used > 0;
}

static bool find_rodata(int fd, const Elf64_Ehdr *head, uint64_t *offset, uint64_t *bytes) {
    Elf64_Shdr names, section;
    char name[16];
    if (head->e_shentsize != sizeof section || head->e_shstrndx >= head->e_shnum ||
        !read_at(fd, head->e_shoff + head->e_shstrndx * sizeof section, &names, sizeof names))
        return false;
    for (unsigned i = 0; i < head->e_shnum && i < HEADERS_MAX; i++) {
        memset(name, 0, sizeof name);
        if (!read_at(fd, head->e_shoff + i * sizeof section, &section, sizeof section) ||
            !read_at(fd, names.sh_offset + section.sh_name, name, 8) ||
            strcmp(name, ".rodata") != 0)
            continue;
        *offset = section.sh_offset;
        *bytes = section.sh_size;
        return true;
    }
    return false;
}

static bool copy_version(const char *at, const char *end, char *text, size_t room) {
    size_t n = 0;
    while (at + n < end && n + 1 < room && (isalnum((unsigned char)at[n]) || at[n] == '.'))
        n++;
    /* a format "%d.%d" and a text cut by the chunk are no versions */
    if (n == 0 || !isdigit((unsigned char)at[0]) || at + n == end)
        return false;
    snprintf(text, room, "%.*s", (int)n, at);
    return true;
}

bool probe_elf_text(epo_probe_task *task, const char *path, const char *mark, char *text,
                    size_t room) {
    Elf64_Ehdr head;
    uint64_t offset = 0, left = 0;
    size_t overlap = strlen(mark) + 64, length = strlen(mark);
    bool found = false;
    int fd = open_elf(path, &head);
    char *chunk = fd >= 0 && find_rodata(fd, &head, &offset, &left) ? malloc(CHUNK) : NULL;
    while (chunk != NULL && !found && left > 0 && task->bytes_left >= CHUNK) {
        size_t want = left < CHUNK ? (size_t)left : CHUNK;
        if (!read_at(fd, offset, chunk, want))
            break;
        task->bytes_left -= want;
        const char *end = chunk + want;
        for (const char *at = chunk; !found && (at = memmem(at, (size_t)(end - at), mark, length));
             at += length)
            found = copy_version(at + length, end, text, room);
        size_t step = want > overlap && want == CHUNK ? want - overlap : want;
        offset += step;
        left -= step;
    }
    free(chunk);
    if (fd >= 0)
        close(fd);
    return found;
}

static bool find_section(int fd, const Elf64_Ehdr *head, uint32_t type, Elf64_Shdr *found) {
    for (unsigned i = 0; i < head->e_shnum && i < HEADERS_MAX; i++)
        if (read_at(fd, head->e_shoff + i * sizeof *found, found, sizeof *found) &&
            found->sh_type == type)
            return true;
    return false;
}

static bool read_number(int fd, const Elf64_Ehdr *head, const char *symbol, uint32_t *number) {
    Elf64_Shdr table, strings, section;
    Elf64_Sym entry;
    char name[64];
    size_t length = strlen(symbol) + 1;
    if (head->e_shentsize != sizeof table || length > sizeof name ||
        !find_section(fd, head, SHT_DYNSYM, &table) || table.sh_link >= head->e_shnum ||
        !read_at(fd, head->e_shoff + table.sh_link * sizeof strings, &strings, sizeof strings))
        return false;
    for (uint64_t i = 0; i < 4096 && (i + 1) * sizeof entry <= table.sh_size; i++) {
        if (!read_at(fd, table.sh_offset + i * sizeof entry, &entry, sizeof entry) ||
            !read_at(fd, strings.sh_offset + entry.st_name, name, length) ||
            memcmp(name, symbol, length) != 0 || entry.st_shndx >= head->e_shnum ||
            !read_at(fd, head->e_shoff + entry.st_shndx * sizeof section, &section, sizeof section))
            continue;
        return entry.st_value >= section.sh_addr &&
               read_at(fd, section.sh_offset + (entry.st_value - section.sh_addr), number,
                       sizeof *number);
    }
    return false;
}

bool probe_elf_number(const char *path, const char *symbol, uint32_t *number) {
    Elf64_Ehdr head;
    int fd = open_elf(path, &head);
    bool found = fd >= 0 && read_number(fd, &head, symbol, number);
    if (fd >= 0)
        close(fd);
    return found;
}
