/* SPDX-License-Identifier: Apache-2.0
 *
 * Options as the programs' manuals have them.  An option that a table does not
 * know, written without '=', makes the rest unreadable: it might take a word.
 */
#include "rules/launcher.h"

#include <ctype.h>
#include <string.h>

typedef enum unknown_long { UNKNOWN_OPAQUE, UNKNOWN_VALUE } unknown_long;

typedef struct launcher {
    const char *name;
    const char *verbs;        /* words that must follow, blanks around each; NULL: none */
    const char *short_values; /* letters that take a value */
    const char *short_flags;
    const char *long_values; /* blanks around each, with '_' as '-' */
    const char *long_flags;
    unknown_long unknown;
    bool assigns;  /* NAME=VALUE may stand before the command */
    int positions; /* words before the command: a duration, a mask */
    epo_launcher_kind next;
} launcher;

static const launcher launchers[] = {
    {"env", NULL, "uC", "i0v", " unset chdir ",
     " ignore-environment null debug default-signal ignore-signal block-signal ", UNKNOWN_OPAQUE,
     true, 0, EPO_LAUNCHER_COMMAND},
    {"numactl", NULL, "iNpmCPw", "lab",
     " interleave cpunodebind preferred membind physcpubind weighted-interleave "
     "preferred-many ",
     " localalloc all balancing ", UNKNOWN_OPAQUE, false, 0, EPO_LAUNCHER_COMMAND},
    {"taskset", NULL, "", "ac", " ", " all-tasks cpu-list ", UNKNOWN_OPAQUE, false, 1,
     EPO_LAUNCHER_COMMAND},
    {"nice", NULL, "n", "", " adjustment ", " ", UNKNOWN_OPAQUE, false, 0, EPO_LAUNCHER_COMMAND},
    {"ionice", NULL, "cn", "t", " class classdata ", " ignore ", UNKNOWN_OPAQUE, false, 0,
     EPO_LAUNCHER_COMMAND},
    {"nohup", NULL, "", "", " ", " ", UNKNOWN_OPAQUE, false, 0, EPO_LAUNCHER_COMMAND},
    {"setsid", NULL, "", "cfw", " ", " ctty fork wait ", UNKNOWN_OPAQUE, false, 0,
     EPO_LAUNCHER_COMMAND},
    {"stdbuf", NULL, "ioe", "", " input output error ", " ", UNKNOWN_OPAQUE, false, 0,
     EPO_LAUNCHER_COMMAND},
    {"timeout", NULL, "ks", "v", " kill-after signal ", " foreground preserve-status verbose ",
     UNKNOWN_OPAQUE, false, 1, EPO_LAUNCHER_COMMAND},
    {"time", NULL, "fo", "pvaq", " format output ", " portability verbose append quiet ",
     UNKNOWN_OPAQUE, false, 0, EPO_LAUNCHER_COMMAND},
    {"nsys", " profile launch ", "bcdefFgiklnNopqstuwxyYVz", "", " ", " ", UNKNOWN_VALUE, false, 0,
     EPO_LAUNCHER_COMMAND},
    {"ncu", NULL, "okcsnlmpi", "f",
     " export target-processes target-processes-filter replay-mode app-replay-match "
     "app-replay-buffer app-replay-mode set section metrics kernel-name kernel-name-base "
     "kernel-id launch-count launch-skip launch-skip-before-match mode port max-connections "
     "section-folder section-folder-recursive profile-from-start cache-control clock-control "
     "nvtx-include nvtx-exclude graph-profiling import import-source source-folder devices "
     "filter-mode page print-units log-file config-file config-file-path check-exit-code "
     "range-filter range-replay-options pm-sampling-interval pm-sampling-buffer-size "
     "pm-sampling-max-passes warp-sampling-interval warp-sampling-max-passes "
     "warp-sampling-buffer-size cpu-stack-trace chips ",
     " force-overwrite nvtx csv call-stack disable-profiler-start-stop disable-extra-suffixes "
     "quiet verbose ",
     UNKNOWN_OPAQUE, false, 0, EPO_LAUNCHER_COMMAND},
    {"torchrun", NULL, "rt", "", " ", " standalone run-path no-python use-env ", UNKNOWN_VALUE,
     false, 0, EPO_LAUNCHER_SCRIPT},
    {"ep-overlap", " exec ", "", "", " ", " ", UNKNOWN_OPAQUE, false, 0, EPO_LAUNCHER_EXEC},
};

static const launcher python = {
    "python",       NULL,  "WX", "bBdEiIOPqsSuvx",   " check-hash-based-pycs ", " ",
    UNKNOWN_OPAQUE, false, 0,    EPO_LAUNCHER_SCRIPT};

static const launcher uv_run = {
    "uv",
    " run ",
    "wpCPf",
    "qvn",
    " extra group no-group only-group with with-editable with-requirements env-file package "
    "python project directory config-file index default-index index-url extra-index-url "
    "find-links index-strategy keyring-provider resolution prerelease fork-strategy "
    "exclude-newer link-mode config-setting no-extra no-build-package no-binary-package "
    "upgrade-package refresh-package reinstall-package cache-dir python-platform color "
    "allow-insecure-host ",
    " all-extras no-dev dev only-dev no-default-groups all-groups no-editable inexact exact "
    "isolated active no-sync locked frozen script no-env-file no-index no-sources upgrade "
    "no-build-isolation reinstall compile-bytecode no-build no-binary no-cache refresh "
    "managed-python no-managed-python offline no-progress no-config quiet verbose no-project "
    "all-packages native-tls preview ",
    UNKNOWN_OPAQUE,
    false,
    0,
    EPO_LAUNCHER_COMMAND};

const char *epo_launcher_base(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

static bool is_listed(const char *list, const char *name, size_t length) {
    char padded[80] = " ";
    if (length == 0 || length + 3 > sizeof padded)
        return false;
    for (size_t i = 0; i < length; i++)
        padded[i + 1] = name[i] == '_' ? '-' : name[i];
    padded[length + 1] = ' ';
    padded[length + 2] = '\0';
    return strstr(list, padded) != NULL;
}

typedef enum option_reading {
    READ_OWN,
    READ_OWN_AND_NEXT,
    READ_NO_OPTION,
    READ_STOP
} option_reading;

static option_reading read_long(const launcher *l, const char *word) {
    const char *name = word + 2, *equals = strchr(name, '=');
    if (equals != NULL)
        return READ_OWN;
    size_t length = strlen(name);
    if (is_listed(" help version ", name, length))
        return READ_STOP;
    if (is_listed(l->long_flags, name, length))
        return READ_OWN;
    return is_listed(l->long_values, name, length) || l->unknown == UNKNOWN_VALUE
               ? READ_OWN_AND_NEXT
               : READ_STOP;
}

/* A cluster of letters: flags, and at its end perhaps one with a value. */
static option_reading read_short(const launcher *l, const char *word) {
    for (const char *letter = word + 1; *letter != '\0'; letter++) {
        if (strchr(l->short_flags, *letter) != NULL)
            continue;
        if (strchr(l->short_values, *letter) == NULL)
            return READ_STOP;
        return letter[1] == '\0' ? READ_OWN_AND_NEXT : READ_OWN;
    }
    return READ_OWN;
}

static option_reading read_option(const launcher *l, const char *word) {
    if (word[0] != '-' || word[1] == '\0')
        return READ_NO_OPTION;
    return word[1] == '-' ? read_long(l, word) : read_short(l, word);
}

static bool is_assignment(const char *word) {
    size_t n = 0;
    while (isalnum((unsigned char)word[n]) || word[n] == '_')
        n++;
    return n > 0 && !isdigit((unsigned char)word[0]) && word[n] == '=';
}

/* Options up to the command.  Python's and torchrun's -m, and the ends of options. */
static epo_launcher_kind read_options(const launcher *l, const char *const *words, size_t count,
                                      size_t at, size_t *taken) {
    bool scripts = l->next == EPO_LAUNCHER_SCRIPT || l == &uv_run;
    int positions = l->positions;
    epo_launcher_kind next = l->next;
    for (; at < count; at++) {
        const char *word = words[at];
        if (scripts && (strcmp(word, "-m") == 0 || strcmp(word, "--module") == 0)) {
            next = EPO_LAUNCHER_MODULE;
            if (l->next == EPO_LAUNCHER_SCRIPT && l != &python)
                continue; /* torchrun's is a flag: options may follow */
            at++;
            break;
        }
        if (l == &python && (strncmp(word, "-c", 2) == 0 || strcmp(word, "-") == 0))
            return EPO_LAUNCHER_NOTHING;
        if (strcmp(word, "--no-python") == 0 || strcmp(word, "--no_python") == 0)
            next = EPO_LAUNCHER_COMMAND;
        if (strcmp(word, "--") == 0) {
            at++;
            break;
        }
        if (l->assigns && (is_assignment(word) || strcmp(word, "-") == 0))
            continue;
        option_reading reading = read_option(l, word);
        if (reading == READ_STOP)
            return strcmp(word, "--help") == 0 || strcmp(word, "--version") == 0
                       ? EPO_LAUNCHER_NOTHING
                       : EPO_LAUNCHER_OPAQUE;
        if (reading == READ_NO_OPTION && positions-- <= 0)
            break;
        at += reading == READ_OWN_AND_NEXT;
    }
    while (l->assigns && at < count && is_assignment(words[at]))
        at++;
    *taken = at < count ? at : count;
    return at < count ? next : EPO_LAUNCHER_NOTHING;
}

/* sh [options] -c TEXT, sh [options] FILE. */
static epo_launcher_kind read_shell(const char *const *words, size_t count, size_t *taken) {
    bool text = false;
    for (size_t at = 1; at < count; at++) {
        const char *word = words[at];
        if ((word[0] != '-' && word[0] != '+') || word[1] == '\0') {
            *taken = at;
            return text ? EPO_LAUNCHER_TEXT : EPO_LAUNCHER_OPAQUE;
        }
        if (strcmp(word, "--rcfile") == 0 || strcmp(word, "--init-file") == 0)
            at++;
        else if (strcmp(word, "--") == 0 || word[1] == '-')
            continue;
        else {
            text = text || (word[0] == '-' && strchr(word, 'c') != NULL);
            if (word[strlen(word) - 1] == 'o' || word[strlen(word) - 1] == 'O')
                at++; /* -o pipefail, -eo pipefail */
        }
    }
    return EPO_LAUNCHER_NOTHING;
}

static bool is_one_of(const char *name, const char *const *list) {
    for (; *list != NULL; list++)
        if (strcmp(name, *list) == 0)
            return true;
    return false;
}

/* python, python3, python3.12 */
static bool is_python(const char *name) {
    if (strncmp(name, "python", 6) != 0)
        return strcmp(name, "pypy3") == 0;
    const char *rest = name + 6;
    return rest[strspn(rest, "0123456789.")] == '\0';
}

epo_launcher_kind epo_launcher_read(const char *const *words, size_t count, size_t *taken) {
    static const char *const shells[] = {"sh", "bash", "dash", "zsh", "ksh", NULL};
    static const char *const opaque[] = {
        "apptainer",    "singularity", "docker", "podman",   "enroot",        "shifter",
        "charliecloud", "ch-run",      "mpirun", "mpiexec",  "mpiexec.hydra", "prun",
        "accelerate",   "deepspeed",   "xargs",  "parallel", "sudo",          "su",
        "ssh",          "script",      NULL};
    const char *name = epo_launcher_base(words[0]);
    *taken = 0;
    if (is_one_of(name, shells))
        return read_shell(words, count, taken);
    if (is_one_of(name, opaque))
        return EPO_LAUNCHER_OPAQUE;
    if (is_python(name))
        return read_options(&python, words, count, 1, taken);
    if (strcmp(name, "uv") == 0)
        return count > 1 && strcmp(words[1], "run") == 0
                   ? read_options(&uv_run, words, count, 2, taken)
                   : EPO_LAUNCHER_NONE;
    for (size_t i = 0; i < sizeof launchers / sizeof launchers[0]; i++) {
        const launcher *l = &launchers[i];
        if (strcmp(name, l->name) != 0)
            continue;
        if (l->verbs == NULL)
            return read_options(l, words, count, 1, taken);
        return count > 1 && is_listed(l->verbs, words[1], strlen(words[1]))
                   ? read_options(l, words, count, 2, taken)
                   : EPO_LAUNCHER_NONE;
    }
    return EPO_LAUNCHER_NONE;
}
