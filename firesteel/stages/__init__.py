"""The line's stages, one module each: they read the artifact before and write their own."""
