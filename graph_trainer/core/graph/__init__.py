"""The joint graph: nodes, signature, annotations, and facts about operators.

Helpers that only one analysis or pass needs belong in that module and not here.
"""
