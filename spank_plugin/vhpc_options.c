/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhpc-options: the option table in other forms, for the manual page, for
 * documentation and for shells' completions.
 *
 *   vhpc-options --help             the options as sbatch --help shows them
 *   vhpc-options --json             the options and plugstack.conf arguments
 *   vhpc-options --man TEMPLATE     TEMPLATE with its lines @OPTIONS@,
 *                                   @ENVIRONMENT@ and @ARGUMENTS@ filled in
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "options.h"

/*
 * Text of man(7): a backslash and a leading dot or quote are special; a dash stays a hyphen-minus.
 */
static void put_man(const char *text)
{
    for (const char *c = text; *c != '\0'; c++) {
        if (*c == '\\')
            fputs("\\e", stdout);
        else if (*c == '-')
            fputs("\\-", stdout);
        else if ((*c == '.' || *c == '\'') && c == text)
            printf("\\&%c", *c);
        else
            putchar(*c);
    }
}

static void man_options(void)
{
    for (size_t i = 0; i < VHPC_OPTION_COUNT; i++) {
        fputs(".TP\n.BI \\-\\-", stdout);
        put_man(vhpc_options[i].name);
        fputs("= ", stdout);
        put_man(vhpc_options[i].arginfo);
        putchar('\n');
        put_man(vhpc_options[i].detail);
        putchar('\n');
    }
}

static void man_environment(void)
{
    for (size_t i = 0; i < VHPC_OPTION_COUNT; i++) {
        printf(".TP\n.B %s\nDefault of\n.BR \\-\\-", vhpc_options[i].variable);
        put_man(vhpc_options[i].name);
        fputs(" .\n", stdout);
    }
}

static void man_arguments(void)
{
    for (size_t i = 0; i < VHPC_ARG_COUNT; i++) {
        printf(".TP\n.BI %s= DIRECTORY\n", vhpc_arg_table[i].name);
        put_man(vhpc_arg_table[i].detail);
        printf(" Default:\n.IR %s .\n", vhpc_arg_table[i].initial);
    }
}

static int print_manual(const char *template)
{
    FILE *file = fopen(template, "re");
    char line[1024];

    if (file == NULL) {
        fprintf(stderr, "vhpc-options: couldn't open %s: %s\n", template, strerror(errno));
        return EXIT_FAILURE;
    }
    while (fgets(line, sizeof line, file) != NULL) {
        if (strcmp(line, "@OPTIONS@\n") == 0)
            man_options();
        else if (strcmp(line, "@ENVIRONMENT@\n") == 0)
            man_environment();
        else if (strcmp(line, "@ARGUMENTS@\n") == 0)
            man_arguments();
        else
            fputs(line, stdout);
    }
    if (ferror(file) != 0) {
        fprintf(stderr, "vhpc-options: couldn't read %s\n", template);
        fclose(file);
        return EXIT_FAILURE;
    }
    fclose(file);
    return EXIT_SUCCESS;
}

static int print_help(void)
{
    for (size_t i = 0; i < VHPC_OPTION_COUNT; i++)
        printf("      --%s=%s\n                              %s\n", vhpc_options[i].name,
               vhpc_options[i].arginfo, vhpc_options[i].usage);
    return EXIT_SUCCESS;
}

/* The tables have no control characters. */
static void put_json(const char *key, const char *text, const char *after)
{
    printf("\"%s\": \"", key);
    for (const char *c = text; *c != '\0'; c++)
        printf(*c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    printf("\"%s", after);
}

static int print_json(void)
{
    fputs("{\n  \"options\": [\n", stdout);
    for (size_t i = 0; i < VHPC_OPTION_COUNT; i++) {
        fputs("    {", stdout);
        put_json("name", vhpc_options[i].name, ", ");
        put_json("value", vhpc_options[i].arginfo, ", ");
        put_json("variable", vhpc_options[i].variable, ", ");
        put_json("usage", vhpc_options[i].usage, ", ");
        put_json("detail", vhpc_options[i].detail, "");
        puts(i + 1 < VHPC_OPTION_COUNT ? "}," : "}");
    }
    fputs("  ],\n  \"arguments\": [\n", stdout);
    for (size_t i = 0; i < VHPC_ARG_COUNT; i++) {
        fputs("    {", stdout);
        put_json("name", vhpc_arg_table[i].name, ", ");
        put_json("default", vhpc_arg_table[i].initial, ", ");
        put_json("detail", vhpc_arg_table[i].detail, "");
        puts(i + 1 < VHPC_ARG_COUNT ? "}," : "}");
    }
    puts("  ]\n}");
    return EXIT_SUCCESS;
}

int main(int argc, char *argv[])
{
    int result = EXIT_FAILURE;

    if (argc == 2 && strcmp(argv[1], "--help") == 0)
        result = print_help();
    else if (argc == 2 && strcmp(argv[1], "--json") == 0)
        result = print_json();
    else if (argc == 3 && strcmp(argv[1], "--man") == 0)
        result = print_manual(argv[2]);
    else
        fputs("usage: vhpc-options --help | --json | --man TEMPLATE\n", stderr);
    if (fflush(stdout) != 0 || ferror(stdout) != 0) {
        fputs("vhpc-options: couldn't write\n", stderr);
        result = EXIT_FAILURE;
    }
    return result;
}
