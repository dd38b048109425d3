"""Structured output: guides become grammars, grammars become masks over the vocabulary.

guide_compiler   front end: compiles in a child process, with limits and a cache
compile_worker   that child
backend          the interface to a grammar library; ``xgrammar`` and ``llguidance`` implement it
guide_manager    engine: one matcher a guided sequence, one mask a step
"""
