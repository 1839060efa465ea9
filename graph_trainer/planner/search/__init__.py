"""Search for the fastest way to train a model on some machines.

`space` lists the runs to choose from, `costs` bounds and estimates one by formulas, `short_models`
estimates it by a model of few layers, and `search` simulates the most promising ones.
"""
