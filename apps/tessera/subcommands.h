// The subcommands of the one binary, a file each. Each parses its own arguments (argv[0] is its name) and
// returns the process's exit status: 0 done, 1 failed at its work, 2 wrong usage.
#pragma once

namespace tessera {

int run_serve(int argc, char** argv);
int run_generate(int argc, char** argv);
int run_score(int argc, char** argv);
int run_eval(int argc, char** argv);
int run_tokenize(int argc, char** argv);
int run_render(int argc, char** argv);
int run_quantize(int argc, char** argv);
int run_chat(int argc, char** argv);
int run_bench(int argc, char** argv);
int run_ops(int argc, char** argv);

}  // namespace tessera
