"""The joint graph: nodes, signature, annotations, and facts about operators.

What only one analysis or pass needs belongs there and not here.
"""
