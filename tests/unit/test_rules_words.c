/* SPDX-License-Identifier: Apache-2.0
 *
 * The words of scripts.
 */
#include "core/status.h"
#include "rules/words.h"
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check_words(const char *text, const char *joined) {
    epo_words words = {0};
    char found[1024] = "";
    CU_ASSERT_EQUAL(epo_words_split(&words, text, strlen(text)), EPO_OK);
    for (size_t i = 0; i < words.count; i++) {
        strncat(found, words.word[i].begins ? "/" : "|", sizeof found - strlen(found) - 1);
        strncat(found, words.word[i].text, sizeof found - strlen(found) - 1);
        strncat(found, words.word[i].open ? "?" : "", sizeof found - strlen(found) - 1);
    }
    if (strcmp(found, joined) != 0)
        fprintf(stderr, "%s -> %s, wanted %s\n", text, found, joined);
    CU_ASSERT_STRING_EQUAL(found, joined);
    epo_words_free(&words);
}

static void words_split_as_a_shell_does(void) {
    check_words("a  b\tc", "/a|b|c");
    check_words("a 'b c' \"d e\"f", "/a|b c|d ef");
    check_words("a \\\n b # comment\nc", "/a|b/c");
    check_words("X=1 Y=\"$X 2\"\necho $Y \"$Y\" ${X}", "/X=1|Y=1 2/echo|1|2|1 2|1");
    check_words("echo ${N:-8} ${M:-$N} $(date) $UNSET", "/echo|8|$N?|$()?|$UNSET?");
    check_words("A=1; echo ${A-2} ${B-2} ${B:-'x y'} \"${B:-\"3\"}\"", "/A=1/echo|1|2|x y|3");
    check_words("A=; echo ${A:-2}${A-3} ${B:-${A:-${C:-4}}}", "/A=/echo|2|4");
    check_words("D=$(date); echo ${D:-2} ${E:=5} $E; : ${F=6}; echo $F",
                "/D=$()?/echo|$()?|5|5/:|6/echo|6");
    check_words("A=\"--x 1 $UNSET\"; A+=' --y'; run $A",
                "/A=--x 1 $UNSET?/A+= --y/run|--x|1|$UNSET?|--y");
    check_words("A=1; if t; then A=2; B=3; fi; run $A $B", "/A=1/if|t/then|A=2/B=3/fi/run|$A?|$B?");
    check_words("A=--x; if t; then A=\"$A --y\"; fi; run $A",
                "/A=--x/if|t/then|A=--x --y/fi/run|--x|--y=$A?");
    check_words("A=--x; [ t ] && A+=' --y'\nrun $A", "/A=--x/[|t|]/A+= --y/run|--x|--y=$A?");
    check_words("A=--x; [ t ] && A+=' c --y 1 2 -z a.b=1 $N'\nrun $A",
                "/A=--x/[|t|]/A+= c --y 1 2 -z a.b=1 $N/run|--x|$A?|--y=$A?|-z=$A?|a.b=$A?|$A?");
    check_words("A=/x; [ t ] && A+=:/y\nrun $A", "/A=/x/[|t|]/A+=:/y/run|$A?");
    check_words(": <<'X'\nrun --x\nX\ncat >a.yaml <<X\nb: --y\nX\nsh <<X\nrun --z\nX",
                "/:|<<X/X/cat|>a.yaml|<<X/X/sh|<<X/run|--z/X");
    check_words("a ${B:-${C:-${D:-${E:-${F:-${G:-${H:-${I:-${J:-1}}}}}}}}}", "/a|$?");
    check_words("a&&b;c|d", "/a/b/c/d");
    /* what sets a variable otherwise */
    check_words("A=1; for A in 2; do b; done; run $A", "/A=1/for|A|in|2/do|b/done/run|$A?");
    check_words("A=1; read -r A <<<2\nrun $A", "/A=1/read|-r|A|<<<2/run|$A?");
    check_words("A=1 B=2; unset A; run $A $B", "/A=1|B=2/unset|A/run|$A?|2");
    check_words("A=1; ((A++)); for ((B=0;B<2;B++)); do c; done; run $A $B",
                "/A=1/for/do|c/done/run|$A?|$B?");
    check_words("A=1; let A+=2; printf -v B 3; run $A $B",
                "/A=1/let|A+=2/printf|-v|B|3/run|$A?|$B?");
    check_words("A=1; ((x\ny)); run $A ${C:-((}", "/A=1/run|1|((");
    /* what is no assignment */
    check_words("A=1; echo A=2; printf %s A; run $A", "/A=1/echo|A=2/printf|%s|A/run|1");
    check_words("B=1 A=2; export -x C=3 D E=4; run $A$B $C$E",
                "/B=1|A=2/export|-x|C=3|D|E=4/run|21|34");
    check_words("A=1; while t; do A=2; for b in c; do d; done; A=3; done; B=2; run $A $B",
                "/A=1/while|t/do|A=2/for|b|in|c/do|d/done/A=3/done/B=2/run|$A?|2");
    check_words("A=1; grep -q b c && A=2\nrun $A", "/A=1/grep|-q|b|c/A=2/run|$A?");
    check_words("A=1; cd b && A=2\nrun $A", "/A=1/cd|b/A=2/run|2");
    check_words("A='--x 8'; run ${A/8/4} ${A:+--y} ${A%8}", "/A=--x 8/run|${}?|${}?|${}?");
    check_words("#SBATCH --ep-overlap=on -N 2 # two\n # SBATCH x\nrun #SBATCH y",
                "/--ep-overlap=on|-N|2/run");
    check_words("run \"${A[@]}\"", "/run|${}?");
    check_words("A=( --x 1 ) && run \"${A[@]}\" --y", "/A=/--x|1/run|$?|--y");
    check_words("echo \"$@ --flag\"", "/echo|$@ --flag?");
    check_words("echo '' \"\"", "/echo||");
    check_words("a\\ b 'it'\\''s'", "/a b|it's");
    check_words("a\\", "/a\\");
    check_words("a \"\\b\\\"\\$c\\\\\\\n\"", "/a|\\b\"$c\\");
    /* brackets and quotes inside of what only a shell can tell */
    check_words("A=$(b ')' \")\" --x); run --y", "/A=$()?/run|--y");
    check_words("run ${A:-\"}\"} \"${A:-it's}\" ${A:-'a}'} --y", "/run|}|it's|a}|--y");
    check_words("run \"$(a \"b)\" \\\")\" --y", "/run|$()?|--y");
    check_words("A=$(cat <<X\nit's (so)\nX\n); run 'a)' --y", "/A=$()?/run|a)|--y");
    check_words("A=$(a # don't\n); run '--y'", "/A=$()?/run|--y");
    check_words("run `a --x | b; c` --y \"d`e \"f\"`\"", "/run|$?|--y|d$?");
    check_words("run a` --y", "/run|a`?|--y");
    check_words("a $? $1b $# c$", "/a|$??|$1b?|$#?|c$");
    check_words("", "");
}

static void functions_are_read_where_they_are_called(void) {
    check_words("f() { A=2; run $A; }; A=1; go $A", "/A=1/go|1");
    check_words("f() { run --x $A; }\nA=1; f; A=2; f", "/A=1/f/run|--x|1/A=2/f/run|--x|2");
    check_words("function f {\nA=2 # }\n}\nA=1; f; go $A", "/A=1/f/A=2/go|2");
    check_words("f () # c\n{ local A=2; B=$A; }; A=1; f; go $A $B",
                "/A=1/f/local|A=2/B=2/go|$A?|2");
    check_words("f() { local A; B=$A; }; A=1; f; go $B", "/A=1/f/local|A/B=$A?/go|$A?");
    check_words("function f() (\nA=2\n)\nA=1; f; go $A", "/A=1/f/A=2/go|1");
    check_words("f() { A=2; }; A=1; f | b; f &\ngo $A", "/A=1/f/A=2/b/f/A=2/go|1");
    check_words("f() { A=2; }; A=1; [ t ] && f\ngo $A", "/A=1/[|t|]/f/A=2/go|$A?");
    check_words("if t; then f() { A=2; }; fi; A=1; f; go $A", "/if|t/then/fi/A=1/f/A=2/go|$A?");
    check_words("f() { A=2; return; A=3; }; f; go $A", "/f/A=2/return/go|2");
    check_words("f() { [ t ] && return; A=3; }; A=1; f; go $A", "/A=1/f/[|t|]/return/A=3/go|$A?");
    check_words("f() { g; }; g() { A=2; }; f; go $A", "/f/g/A=2/go|2");
    check_words("f() { A=2; f; f; }; f; go $A", "/f/A=2/f/f/go|2");
    check_words("f() { A=2; }; A=1; export -f f; go $A", "/A=1/export|-f|f/A=2/go|$A?");
    check_words("f() { case a in (a) b;; c) d;; esac; }; f; e", "/f/case|a|in/a/b/c/d/esac/e");
    check_words("f() { if a; then b; fi }; f", "/f/if|a/then|b/fi");
    check_words("A=1; (A=2; (A=3); go $A); go $A", "/A=1/A=2/A=3/go|2/go|1");
    check_words("A=1; (f() { A=2; }; f); f; go $A", "/A=1/f/A=2/f/go|1");
    /* what is none: a body that nothing ends, no body, no name */
    check_words("f() { a", "/f/{|a");
    check_words("f() a", "/f/a");
    check_words("A=() { a; }", "/A=/{|a/}");
    /* told: the first that nothing calls, and a file that is read elsewhere */
    epo_words words = {0};
    const char *text = ". ~/.bashrc; source env/bin/activate\nf() { a; }\n\n. ./b.sh\ng() { f; }\n";
    CU_ASSERT_EQUAL(epo_words_split(&words, text, strlen(text)), EPO_OK);
    CU_ASSERT_STRING_EQUAL(words.uncalled, "f");
    CU_ASSERT_EQUAL(words.uncalled_line, 2);
    CU_ASSERT_EQUAL(words.source_line, 4);
    epo_words_free(&words);
}

/* A command that does not go on to its options: a shell takes them for another. */
static void options_can_be_cut_off(void) {
    static const struct {
        const char *script, *joined;
        unsigned line;
    } cases[] = {
        {"run \\ \n --x 1 \\\n --y\n go", "/run| /go", 2},
        {"run a \\\n # --x \\\n --y 1; go", "/run|a/go", 3},
        {"run \\\n\n\t# a\n  --y\n", "/run", 4},
        {"f() { run \\\n\n --y; }\nf", "/f/run", 3},
        {"run \\\n  --x \\\n  --y # \\ \ngo\n--z", "/run|--x|--y/go/--z", 0},
        {"run \\\n  # a\ngo", "/run/go", 0},
        {"A=(--x \\ \n # b\n --y)", "/A=/--x| /--y", 0},
        {"run \"\\ \n --x\"", "/run|\\ \n --x", 0},
        {"--x 1\n\n--y", "/--x|1/--y", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        epo_words words = {0};
        check_words(cases[i].script, cases[i].joined);
        CU_ASSERT_EQUAL(epo_words_split(&words, cases[i].script, strlen(cases[i].script)), EPO_OK);
        CU_ASSERT_EQUAL(words.cut_line, cases[i].line);
        epo_words_free(&words);
    }
}

/* Functions that call each other twice grow without end; so do those that nothing ends. */
static void functions_have_a_bound(void) {
    size_t size = 4u << 20, used = 0;
    char *text = malloc(size);
    epo_words words = {0};
    for (int i = 0; i < 40; i++)
        used +=
            (size_t)snprintf(text + used, size - used, "f%d() { f%d; f%d; }\n", i, i + 1, i + 1);
    used += (size_t)snprintf(text + used, size - used, "f40() { : %0600000d; }\nf30\n", 0);
    CU_ASSERT_EQUAL(epo_words_split(&words, text, used), EPO_E_OVERFLOW);
    epo_words_free(&words);
    for (used = 0; used + 8 < size;)
        used += (size_t)snprintf(text + used, size - used, "f() {\n");
    CU_ASSERT_EQUAL(epo_words_split(&words, text, used), EPO_E_OVERFLOW);
    epo_words_free(&words);
    for (used = 0; used + 40 < size;)
        used += (size_t)snprintf(text + used, size - used, "(A=$A%08x\n", 1);
    (void)epo_words_split(&words, text, used);
    epo_words_free(&words);
    free(text);
}

static void words_refuse_what_is_no_script(void) {
    epo_words words = {0};
    CU_ASSERT_EQUAL(epo_words_split(&words, "a\nb 'c", 6), EPO_E_ARG);
    CU_ASSERT_STRING_EQUAL(epo_fail_text(), "line 2: a quote (') is never closed");
    CU_ASSERT_EQUAL(epo_words_split(&words, "a\0b", 3), EPO_E_ARG);
    CU_ASSERT_STRING_EQUAL(epo_fail_text(), "line 1: a zero byte; this is not text");
    epo_words_free(&words);
}

/* $1 and "$@" hold what the function was called with, which counts where its body uses it. */
static void arguments_stand_where_they_are_used(void) {
    check_words("f() { run \"$@\" --y; }; f --x 1", "/f/run|--x|1|--y");
    check_words("f() { run $1 ${2} $3 ${10} e; }; f a 'b c'", "/f/run|a|b|c|e");
    check_words("f() { run \"$2\" a\"$@\"b \"$*\" ${*}; }; f a 'b c'",
                "/f/run|b c|aa|b cb|a b c|a|b|c");
    check_words("f() { run \"$@\" \"\"; }; f", "/f/run|");
    check_words("f() { run \"$@\"; }; f '' a", "/f/run||a");
    check_words("f() { A=\"run $@\"; go $A; B=$*; go $B; }; f a b",
                "/f/A=run a b/go|run|a|b/B=a b/go|a|b");
    check_words("f() { local A=(\"$@\"); }; f a b", "/f/local|A=/a|b");
    check_words("f() { \"$@\"; }; f run a >b 2>&1", "/f/run|a");
    check_words("f() { \"$@\"; }; g() { run $1; }; f g a >| b", "/f/g/run|a/b");
    check_words("A=1 f a; f() { run $1; }; A=2 B=3 f a", "/A=1|f|a/A=2|B=3|f/run|a");
    check_words("f() { run ${1:-8} ${2:-9} ${3-7} ${4-6} ${1?no}; }; f 1 '' ''", "/f/run|1|9|6|1");
    check_words("f() { g \"$@\" c; run $1; }; g() { run $2; }; f a b", "/f/g/run|b/run|a");
    check_words("f() { f a; run $1; }; f b", "/f/f|a/run|b");
    check_words("f() { run; }; f --x; [ t ] && f --y", "/f/run/[|t|]/f/run");
    /* shift */
    check_words(
        "f() { A=$1; shift; run $A $1 \"$@\"; shift 2; run \"$@\"; shift; run $1; }; f a b c d",
        "/f/A=a/shift/run|a|b|b|c|d/shift|2/run|d/shift/run");
    check_words("f() { shift 3; run $1; }; f a b", "/f/shift|3/run|a");
    check_words("f() { run \"${@:2}\" ${@:1}; }; f a b", "/f/run|b|a|b");
    check_words("f() { [ t ] && shift; run $1; }; f a b", "/f|a|b/[|t|]/shift/run|$1?");
    check_words("f() { shift $N; run $1; }; f a b", "/f|a|b/shift|$N?/run|$1?");
    check_words("f() { while t; do run $1; shift; done; }; f a",
                "/f|a/while|t/do|run|$1?/shift/done");
    check_words("f() { set -e; run $1; set -- b; run $1; }; f a",
                "/f|a/set|-e/run|a/set|--|b/run|$1?");
    check_words("f() { run ${@: -1} \"$@\"; }; f a", "/f|a/run|${}?|$@?");
    /* what only a shell can tell: how many words $U and an array are, and what they hold */
    check_words("f() { run $1 \"$2\" $#; }; f \"$U\" a", "/f/run|$U?|a|$#?");
    check_words("f() { run $1 $2 \"$@\"; }; f a $U b", "/f/run|a|$2?|a|$U?|b");
    check_words("A=(x y); f() { run $1 \"$@\" ${2:-d}; }; f \"${A[@]}\" b",
                "/A=/x|y/f/run|$1?|$?|b|$2?");
    check_words("f() { run ${1:-d} ${1-e}; }; f \"$U\"", "/f/run|$1?|$U?");
    check_words("f() { run ${1:-d}; }; export -f f; run $1 ${2:-e}",
                "/export|-f|f/run|$1?/run|$1?|e");
    check_words("if t; then f() { run $1; }; fi; f a", "/if|t/then/fi/f|a/run|a");
}

/* "$@" twice, in functions that call each other, grows without end. */
static void arguments_have_a_bound(void) {
    char text[4096];
    size_t used = 0;
    epo_words words = {0};
    for (int i = 0; i < 15; i++)
        used += (size_t)snprintf(text + used, sizeof text - used,
                                 "f%d() { f%d \"$@\" \"$@$@$@$@\" \"$@\"; }\n", i, i + 1);
    snprintf(text + used, sizeof text - used, "f15() { run \"$@\"; }\nf0 %0999d\n", 0);
    CU_ASSERT_EQUAL(epo_words_split(&words, text, strlen(text)), EPO_E_OVERFLOW);
    epo_words_free(&words);
}

int main(void) {
    CU_TestInfo tests[] = {
        {"words split as a shell does", words_split_as_a_shell_does},
        {"functions are read where they are called", functions_are_read_where_they_are_called},
        {"functions have a bound", functions_have_a_bound},
        {"words refuse what is no script", words_refuse_what_is_no_script},
        {"options can be cut off", options_can_be_cut_off},
        {"arguments stand where they are used", arguments_stand_where_they_are_used},
        {"arguments have a bound", arguments_have_a_bound},
        CU_TEST_INFO_NULL,
    };
    return unit_run("rules_words", tests);
}
