/* SPDX-License-Identifier: Apache-2.0
 *
 * Which program a task runs, what its arguments lack, and the vector that is made.
 */
#include "rules/complete.h"
#include "rules/launcher.h"
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORDS_MAX 96

static int count_of(const char *const *words) {
    int count = 0;
    while (words[count] != NULL)
        count++;
    return count;
}

static epo_status read_words(const char *const *words, epo_program *program) {
    return epo_program_read((char *const *)(uintptr_t)words, count_of(words), program);
}

enum { OTHER = 'o', LM = 'm', BRIDGE = 'b', UNDECIDED = '?' };

static int letter_of(const epo_program *program) {
    if (program->kind == EPO_PROGRAM_UNDECIDED)
        return UNDECIDED;
    if (program->kind == EPO_PROGRAM_OTHER)
        return OTHER;
    return program->framework == EPO_FRAMEWORK_BRIDGE ? BRIDGE : LM;
}

static void check(int want, const char *const *words) {
    epo_program program;
    CU_ASSERT_EQUAL_FATAL(read_words(words, &program), EPO_OK);
    if (letter_of(&program) != want)
        fprintf(stderr, "%s ... %s: is %c (%s), wanted %c\n", words[0], words[count_of(words) - 1],
                letter_of(&program), program.why, want);
    CU_ASSERT_EQUAL(letter_of(&program), want);
    CU_ASSERT_EQUAL(program.why[0] != '\0', want == UNDECIDED);
    epo_program_free(&program);
}

#define CHECK(want, ...) check(want, (const char *const[]){__VA_ARGS__, NULL})

static void launchers_are_looked_through(void) {
    CHECK(LM, "python", "pretrain_gpt.py", "--bf16");
    CHECK(LM, "/opt/venv/bin/python3.12", "-u", "-W", "ignore", "/src/pretrain_gpt.py");
    CHECK(LM, "env", "-u", "X", "A=1", "B=2 3", "python3", "pretrain_gpt.py");
    CHECK(LM, "env", "-", "A=1", "./pretrain_gpt.py");
    CHECK(LM, "numactl", "--cpunodebind=0", "--membind", "0", "python", "pretrain_gpt.py");
    CHECK(LM, "numactl", "-N", "0", "-m0", "--", "python", "pretrain_gpt.py");
    CHECK(LM, "taskset", "0xff", "python", "pretrain_gpt.py");
    CHECK(LM, "timeout", "-k", "5", "10m", "python", "pretrain_gpt.py");
    CHECK(LM, "nsys", "profile", "-t", "cuda,nvtx", "--capture-range", "cudaProfilerApi", "-o",
          "python", "python", "pretrain_gpt.py");
    CHECK(LM, "ncu", "--nvtx", "-f", "-o", "out", "--set", "full", "python", "pretrain_gpt.py");
    CHECK(LM, "uv", "run", "--frozen", "--with", "x", "python", "pretrain_gpt.py");
    CHECK(LM, "uv", "run", "pretrain_gpt.py", "--bf16");
    CHECK(LM, "uv", "run", "-m", "pretrain_gpt");
    CHECK(LM, "uv", "run", "torchrun", "--nproc-per-node", "8", "pretrain_gpt.py");
    CHECK(LM, "torchrun", "--standalone", "--nproc_per_node=8", "--nnodes", "2", "pretrain_gpt.py");
    CHECK(LM, "torchrun", "--no-python", "--nnodes", "2", "python", "pretrain_gpt.py");
    CHECK(LM, "python", "-m", "torch.distributed.run", "--nproc-per-node=8", "pretrain_gpt.py");
    CHECK(LM, "python", "-m", "torch.distributed.launch", "--use_env", "-m", "pretrain_gpt");
    CHECK(LM, "python", "my_train.py", "--expert-model-parallel-size", "8", "--train-iters=9");
    CHECK(LM, "python", "my_train.py", "--overlap-moe-expert-parallel-comm");
    CHECK(LM, "ep-overlap", "exec", "--", "python", "pretrain_gpt.py");
    CHECK(BRIDGE, "torchrun", "run_recipe.py", "model.num_layers=4");
    CHECK(BRIDGE, "python", "train.py", "comm_overlap.delay_wgrad_compute=false");
    CHECK(BRIDGE, "python", "/x/Megatron-Bridge/scripts/a.py");
    CHECK(BRIDGE, "python", "run.py", "--moe_a2a_overlap", "true");
    CHECK(BRIDGE, "python", "-m", "megatron.bridge.run", "x=1");
}

static void shells_are_read(void) {
    CHECK(LM, "bash", "-c", "python pretrain_gpt.py --bf16");
    CHECK(LM, "sh", "-ec", "cd /x && exec python pretrain_gpt.py --bf16 2>&1 | tee log");
    CHECK(LM, "bash", "-eo", "pipefail", "-c", "A=1 python pretrain_gpt.py > log");
    CHECK(LM, "bash", "-l", "--norc", "-c",
          "source x.sh; if true; then python pretrain_gpt.py; fi");
    CHECK(LM, "bash", "-c", "bash prepare.sh; python pretrain_gpt.py");
    CHECK(LM, "bash", "-c", "python pretrain_gpt.py --node-rank $SLURM_NODEID --save \"$D/x\"");
    CHECK(LM, "bash", "-c", "P=pretrain_gpt.py; python $P --bf16");
    CHECK(UNDECIDED, "bash", "-c", "python pretrain_gpt.py $ARGS");
    CHECK(UNDECIDED, "bash", "-c", "python pretrain_gpt.py --bf16 $ARGS");
    CHECK(UNDECIDED, "bash", "-c", "python pretrain_gpt.py \"$@\"", "x", "--bf16");
    CHECK(UNDECIDED, "bash", "-c", "$CMD --bf16");
    CHECK(UNDECIDED, "bash", "-c", "python $SCRIPT --bf16");
    CHECK(UNDECIDED, "bash", "-c", "python pretrain_gpt.py; python pretrain_gpt.py --bf16");
    CHECK(UNDECIDED, "bash", "-c", "python 'pretrain_gpt.py");
    CHECK(UNDECIDED, "bash", "-c", "bash -c 'python pretrain_gpt.py'");
    CHECK(UNDECIDED, "python", "tools/run_server.py", "--expert-model-parallel-size", "8");
    CHECK(UNDECIDED, "bash", "run.sh");
    CHECK(UNDECIDED, "apptainer", "exec", "x.sif", "python", "pretrain_gpt.py");
    CHECK(UNDECIDED, "numactl", "--new-option", "0", "python", "pretrain_gpt.py");
    CHECK(UNDECIDED, "python", "run_nemo.py", "model.moe_token_dispatcher_type=flex");
}

static void other_programs_stay_other(void) {
    CHECK(OTHER, "true");
    CHECK(OTHER, "bash");
    CHECK(OTHER, "bash", "-c", "echo pretrain_gpt.py; ls -c python pretrain_gpt.py");
    CHECK(OTHER, "/home/bashir/train", "-c", "python pretrain_gpt.py");
    CHECK(OTHER, "/home/python/train", "pretrain_gpt.py");
    CHECK(OTHER, "./train", "--bf16", "--expert-model-parallel-size", "8");
    CHECK(OTHER, "python", "train.py", "--bf16", "--num-layers", "4");
    CHECK(OTHER, "python", "my_pretrain_gpt.py");
    CHECK(OTHER, "python", "pretrain_gpt.py.bak");
    CHECK(OTHER, "python", "/x/my-Megatron-Bridge/a.py");
    CHECK(OTHER, "python", "-c", "import x", "pretrain_gpt.py");
    CHECK(OTHER, "python", "--version");
    CHECK(OTHER, "python", "app.py", "model.size=4");
    CHECK(OTHER, "torchrun2", "pretrain_gpt.py");
    CHECK(OTHER, "environment", "A=1", "python", "pretrain_gpt.py");
    CHECK(OTHER, "srun", "python", "pretrain_gpt.py"); /* a step of its own */
    CHECK(OTHER, "nsys", "stats", "python", "pretrain_gpt.py");
    CHECK(OTHER, "env");
    CHECK(OTHER, "");
    epo_program program;
    CU_ASSERT_EQUAL(epo_program_read(NULL, 0, &program), EPO_OK);
    CU_ASSERT_EQUAL(program.kind, EPO_PROGRAM_OTHER);
    epo_program_free(&program);
    epo_program_free(NULL);
}

/* --- completion ----------------------------------------------------------------- */

static const char lm_wanted[] = "--overlap-moe-expert-parallel-comm "
                                "--moe-token-dispatcher-type alltoall";
static const char lm_flex[] = "--overlap-moe-expert-parallel-comm "
                              "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend "
                              "deepep --moe-router-dtype fp32 --delay-wgrad-compute";

static void complete(const char *const *words, const epo_wish *wish, epo_completion *completion,
                     struct epo_text *line) {
    epo_program program;
    char **vector = NULL;
    CU_ASSERT_EQUAL_FATAL(read_words(words, &program), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(program.kind, EPO_PROGRAM_FRAMEWORK);
    CU_ASSERT_EQUAL_FATAL(epo_complete(&program, wish, completion), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_complete_vector((char *const *)(uintptr_t)words, count_of(words),
                                              &program, completion, &vector),
                          EPO_OK);
    for (size_t i = 0; vector[i] != NULL; i++) {
        epo_text_add_string(line, i > 0 ? "|" : "");
        epo_text_add_string(line, vector[i]);
    }
    epo_vector_free(vector);
    epo_program_free(&program);
}

static void check_line(const char *want, const epo_wish *wish, const char *const *words) {
    epo_completion completion;
    struct epo_text line = EPO_TEXT_INIT;
    complete(words, wish, &completion, &line);
    char *text = epo_text_take(&line);
    CU_ASSERT_EQUAL(completion.contradictions, 0);
    if (strcmp(text, want) != 0)
        fprintf(stderr, "made   %s\nwanted %s\n", text, want);
    CU_ASSERT_STRING_EQUAL(text, want);
    free(text);
    epo_completion_free(&completion);
}

#define LINE(want, wish, ...) check_line(want, wish, (const char *const[]){__VA_ARGS__, NULL})

static void what_lacks_is_added(void) {
    epo_wish wish = {.arguments = lm_wanted};
    LINE("python|pretrain_gpt.py|a b|--overlap-moe-expert-parallel-comm|"
         "--moe-token-dispatcher-type|alltoall",
         &wish, "python", "pretrain_gpt.py", "a b");
    LINE("python|pretrain_gpt.py|--moe-token-dispatcher-type=alltoall|"
         "--overlap-moe-expert-parallel-comm",
         &wish, "python", "pretrain_gpt.py", "--moe-token-dispatcher-type=alltoall");
    LINE("python|pretrain_gpt.py|--overlap-moe-expert-parallel-comm|"
         "--moe-token-dispatcher-type|flex", /* a default gives way */
         &wish, "python", "pretrain_gpt.py", "--overlap-moe-expert-parallel-comm",
         "--moe-token-dispatcher-type", "flex");
    LINE("sh|-c|cd x; python pretrain_gpt.py \"a b\" --overlap-moe-expert-parallel-comm "
         "--moe-token-dispatcher-type alltoall 2>&1 | tee log|x",
         &wish, "sh", "-c", "cd x; python pretrain_gpt.py \"a b\" 2>&1 | tee log", "x");
    LINE("sh|-c|python pretrain_gpt.py a\\ --overlap-moe-expert-parallel-comm "
         "--moe-token-dispatcher-type alltoall", /* a last backslash is one, for the shell too */
         &wish, "sh", "-c", "python pretrain_gpt.py a\\");
    wish.arguments = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep";
    LINE("python|pretrain_gpt.py|--moe-token-dispatcher-type|alltoall", &wish, "python",
         "pretrain_gpt.py", "--moe-token-dispatcher-type", "alltoall");
    wish.arguments = "comm_overlap.overlap_moe_expert_parallel_comm=true "
                     "comm_overlap.delay_wgrad_compute=false model.bf16=true";
    LINE("python|run_recipe.py|+model.bf16=True|comm_overlap.delay_wgrad_compute=true|"
         "comm_overlap.overlap_moe_expert_parallel_comm=true",
         &wish, "python", "run_recipe.py", "+model.bf16=True",
         "comm_overlap.delay_wgrad_compute=true");
    LINE("python|run_recipe.py|model.num_layers=4|model.bf16|" /* a bare word sets nothing */
         "comm_overlap.overlap_moe_expert_parallel_comm=true|"
         "comm_overlap.delay_wgrad_compute=false|model.bf16=true",
         &wish, "python", "run_recipe.py", "model.num_layers=4", "model.bf16");
    wish.arguments = "--note \"it's a b\"";
    LINE("sh|-c|python pretrain_gpt.py --note 'it'\\''s a b' >x", &wish, "sh", "-c",
         "python pretrain_gpt.py >x");
}

static void check_contradictions(size_t want, const char *part, const epo_wish *wish,
                                 const char *const *words) {
    epo_completion completion;
    struct epo_text line = EPO_TEXT_INIT;
    complete(words, wish, &completion, &line);
    CU_ASSERT_EQUAL_FATAL(completion.contradictions, want);
    if (want > 0)
        CU_ASSERT_PTR_NOT_NULL(strstr(completion.contradiction[want - 1], part));
    epo_text_free(&line);
    epo_completion_free(&completion);
}

#define REFUSED(want, part, wish, ...)                                                             \
    check_contradictions(want, part, wish, (const char *const[]){__VA_ARGS__, NULL})

static void contradictions_name_both(void) {
    epo_wish wish = {.arguments = lm_flex,
                     .given = {[EPO_OPT_DISPATCHER] = true},
                     .asked_by = {[EPO_OPT_DISPATCHER] = "--ep-dispatcher=flex",
                                  [EPO_OPT_DELAY_WGRAD] = "--no-delay-wgrad"},
                     .delayed = true};
    REFUSED(1, "--ep-dispatcher=flex contradicts the argument --moe-token-dispatcher-type alltoall",
            &wish, "python", "pretrain_gpt.py", "--moe-token-dispatcher-type", "alltoall");
    REFUSED(1, "--moe-flex-dispatcher-backend hybridep", &wish, "python", "pretrain_gpt.py",
            "--moe-flex-dispatcher-backend=hybridep");
    REFUSED(2, "--no-delay-wgrad-compute", &wish, "python", "pretrain_gpt.py",
            "--moe-token-dispatcher-type=alltoall", "--no-delay-wgrad-compute");
    wish = (epo_wish){.arguments = lm_wanted,
                      .asked_by = {[EPO_OPT_DELAY_WGRAD] = "--no-delay-wgrad"}};
    REFUSED(0, "", &wish, "python", "pretrain_gpt.py", "--delay-wgrad-compute");
    wish.given[EPO_OPT_DELAY_WGRAD] = true;
    REFUSED(1, "--no-delay-wgrad contradicts the argument --delay-wgrad-compute", &wish, "python",
            "pretrain_gpt.py", "--delay-wgrad-compute");
    REFUSED(0, "", &wish, "python", "pretrain_gpt.py", "--some-other-argument"); /* as long */
    REFUSED(1, "--delay-wgrad-compute", &wish, "python", "pretrain_gpt.py", "--delay-wgrad-compute",
            "--", "a", "b"); /* said once */
    wish = (epo_wish){.arguments = "comm_overlap.overlap_moe_expert_parallel_comm=true",
                      .asked_by = {"--ep-overlap=on"}};
    REFUSED(1,
            "--ep-overlap=on contradicts the argument "
            "comm_overlap.overlap_moe_expert_parallel_comm=false",
            &wish, "python", "x.py", "comm_overlap.overlap_moe_expert_parallel_comm=false");
    REFUSED(1, "~comm_overlap.overlap_moe_expert_parallel_comm", &wish, "python",
            "/x/Megatron-Bridge/x.py", "~comm_overlap.overlap_moe_expert_parallel_comm");
    REFUSED(1, "--moe_a2a_overlap False", &wish, "python", "x.py", "--moe_a2a_overlap", "False");
}

/* --- random vectors against what they were made of --------------------------------- */

static unsigned random_state = 12345;
static unsigned random_below(unsigned n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

struct made {
    const char *words[WORDS_MAX];
    int count;
    int program; /* where the script stands */
    bool overlap, alltoall, flex, delayed;
};

static void push(struct made *made, const char *text) {
    for (const char *at = text; *at != '\0';) { /* '|' parts words */
        static char store[1 << 16];
        static size_t used;
        size_t length = strcspn(at, "|");
        if (used + length + 1 > sizeof store)
            used = 0;
        memcpy(store + used, at, length);
        store[used + length] = '\0';
        made->words[made->count++] = store + used;
        used += length + 1;
        at += length + (at[length] == '|');
    }
}

static void make_vector(struct made *made) {
    static const char *const before[] = {"env|A=b c|B=",
                                         "env|-i|-u|python|X=pretrain_gpt.py",
                                         "numactl|-m|0|-N0",
                                         "numactl|--localalloc|--",
                                         "nsys|profile|-o|torchrun|--trace=cuda",
                                         "ncu|-f|--set|full",
                                         "uv|run|--extra|bash|--frozen",
                                         "/home/bashir/bin/nice|-n|3",
                                         "timeout|-s|9|1h",
                                         "ep-overlap|exec|--",
                                         "taskset|-c|0-7",
                                         "nohup",
                                         "stdbuf|-oL"};
    static const char *const runners[] = {
        "python",
        "/usr/bin/python3|-u",
        "torchrun|--nproc-per-node|8|--standalone",
        "python3.11|-m|torch.distributed.run|--nnodes|2|--rdzv_id=x",
        "uv|run",
        "torchrun|--nnodes=1:2|-t|3"};
    static const char *const arguments[] = {
        "--bf16",    "--save|/a b/it's", "--num-experts|8", "--data-path|$HOME \"x\"",
        "--note|--", "--seed=7",         "--log|;rm -rf|",  "--name|*"};
    memset(made, 0, sizeof *made);
    for (unsigned i = random_below(4); i > 0; i--)
        push(made, before[random_below(sizeof before / sizeof *before)]);
    push(made, runners[random_below(sizeof runners / sizeof *runners)]);
    made->program = made->count;
    push(made, random_below(2) ? "pretrain_gpt.py" : "/src/it is/pretrain_mamba.py");
    for (unsigned i = random_below(6); i > 0; i--)
        push(made, arguments[random_below(sizeof arguments / sizeof *arguments)]);
    if ((made->overlap = random_below(2)))
        push(made, "--overlap-moe-expert-parallel-comm");
    if ((made->alltoall = random_below(3) == 0))
        push(made, random_below(2) ? "--moe-token-dispatcher-type=alltoall"
                                   : "--moe-token-dispatcher-type|alltoall");
    else if ((made->flex = random_below(3) == 0))
        push(made, "--moe-token-dispatcher-type|flex");
    if ((made->delayed = random_below(3) == 0))
        push(made, "--delay-wgrad-compute");
}

/* The whole vector as one text for a shell, in a random style of quotes. */
static char *as_text(const struct made *made) {
    struct epo_text text = EPO_TEXT_INIT;
    epo_text_add_string(&text, random_below(2) ? "cd /tmp && A=1 exec " : "");
    for (int i = 0; i < made->count; i++) {
        epo_text_add_string(&text, i == 0 ? "" : random_below(4) ? " " : " \\\n ");
        bool escape = random_below(2) && made->words[i][0] != '\0';
        for (const char *c = made->words[i]; escape && *c != '\0'; c++)
            epo_text_format(&text, strchr("'\" $;*|&<>#", *c) ? "\\%c" : "%c", *c);
        if (!escape)
            epo_quote(&text, made->words[i]);
    }
    epo_text_add_string(&text, random_below(2) ? " >\"a b\" 2>&1 | tee x; echo done" : "");
    return epo_text_take(&text);
}

static void reference(const struct made *made, bool delayed, struct epo_text *line) {
    for (int i = 0; i < made->count; i++)
        epo_text_format(line, "%s\x01", made->words[i]);
    if (!made->overlap)
        epo_text_add_string(line, "--overlap-moe-expert-parallel-comm\x01");
    if (!made->alltoall && !made->flex)
        epo_text_add_string(line, "--moe-token-dispatcher-type\x01"
                                  "alltoall\x01");
    if (delayed && !made->delayed)
        epo_text_add_string(line, "--delay-wgrad-compute\x01");
}

/* The command's words in a text: those before its redirection. */
static void words_of(const char *text, size_t from, struct epo_text *line) {
    epo_words words = {0};
    CU_ASSERT_EQUAL_FATAL(epo_words_split(&words, text, strlen(text)), EPO_OK);
    for (size_t i = from; i < words.count && !words.word[i].redirects; i++)
        epo_text_format(line, "%s\x01", words.word[i].text);
    epo_words_free(&words);
}

static void run_random(const struct made *made, bool shell) {
    bool delayed = random_below(2);
    char wanted[160];
    snprintf(wanted, sizeof wanted, "%s%s", lm_wanted, delayed ? " --delay-wgrad-compute" : "");
    epo_wish wish = {.arguments = wanted, .delayed = delayed};
    struct epo_text want = EPO_TEXT_INIT, have = EPO_TEXT_INIT;
    char *text = shell ? as_text(made) : NULL;
    const char *vector[WORDS_MAX + 1] = {"bash", "-c", text, NULL};
    if (!shell)
        memcpy(vector, made->words, sizeof made->words);
    epo_program program;
    epo_completion completion = {0};
    char **result = NULL;
    CU_ASSERT_EQUAL_FATAL(read_words(vector, &program), EPO_OK);
    if (program.kind != EPO_PROGRAM_FRAMEWORK)
        fprintf(stderr, "%s: %s\n", program.why, shell ? text : vector[0]);
    CU_ASSERT_EQUAL_FATAL(program.kind, EPO_PROGRAM_FRAMEWORK);
    CU_ASSERT_STRING_EQUAL(program.words.word[0].text, made->words[made->program]);
    CU_ASSERT_EQUAL(epo_complete(&program, &wish, &completion), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_complete_vector((char *const *)(uintptr_t)vector, count_of(vector),
                                              &program, &completion, &result),
                          EPO_OK);
    reference(made, delayed, &want);
    for (size_t i = 0; !shell && result[i] != NULL; i++)
        epo_text_format(&have, "%s\x01", result[i]);
    if (shell)
        words_of(result[2], strncmp(text, "cd ", 3) == 0 ? 4 : 0, &have);
    if (strcmp(want.data, have.data) != 0)
        fprintf(stderr, "wanted %s\nmade   %s\n", want.data, have.data);
    CU_ASSERT_STRING_EQUAL(want.data, have.data);
    epo_vector_free(result);
    epo_completion_free(&completion);
    epo_program_free(&program);
    epo_text_free(&want);
    epo_text_free(&have);
    free(text);
}

static void random_vectors_come_out_as_the_reference_has_them(void) {
    for (int i = 0; i < 600; i++) {
        struct made made;
        make_vector(&made);
        run_random(&made, i % 2);
    }
}

/* Words that a framework is never made of, in any order, never make one. */
static void random_words_are_no_framework(void) {
    static const char *const words[] = {"/home/bashir/x",
                                        "bash",
                                        "-c",
                                        "env",
                                        "A=1",
                                        "python2x",
                                        "uv",
                                        "run",
                                        "--",
                                        "-",
                                        "",
                                        "nsys",
                                        "profile",
                                        "-o",
                                        "'",
                                        "\"",
                                        "$(",
                                        "`",
                                        "torchrun",
                                        "x.py",
                                        "ls",
                                        "-m",
                                        "ncu"};
    for (int i = 0; i < 5000; i++) {
        const char *vector[12];
        int count = 1 + (int)random_below(11);
        for (int j = 0; j < count; j++)
            vector[j] = words[random_below(sizeof words / sizeof *words)];
        epo_program program;
        CU_ASSERT_EQUAL(epo_program_read((char *const *)(uintptr_t)vector, count, &program),
                        EPO_OK);
        CU_ASSERT_NOT_EQUAL(program.kind, EPO_PROGRAM_FRAMEWORK);
        epo_program_free(&program);
    }
}

#define TEST(name)                                                                                 \
    { #name, name }
int main(void) {
    static const CU_TestInfo tests[] = {TEST(launchers_are_looked_through),
                                        TEST(shells_are_read),
                                        TEST(other_programs_stay_other),
                                        TEST(what_lacks_is_added),
                                        TEST(contradictions_name_both),
                                        TEST(random_vectors_come_out_as_the_reference_has_them),
                                        TEST(random_words_are_no_framework),
                                        CU_TEST_INFO_NULL};
    return unit_run("program", tests);
}
