"""The only code that is loaded inside a vLLM process: a KV connector that hands out hidden states. Imports no training code."""
