"""Machines and what runs on them: topology, plan, simulation, launch. Knows the recipe, and nothing of models but their sizes."""
