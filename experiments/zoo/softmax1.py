"""Softmax off by one: a head may attend to nothing, since the softmax's sum has one more term.

Miller, 2023, "Attention Is Off By One":

    softmax1(x)_i  =  exp(x_i) / (1 + sum over j of exp(x_j))

A sink logit of 0 is that term (exp(0) = 1). `sink_logits` gives a model without sinks one of 0 for each head, so no
code is needed. The post trains models with it, for fewer outliers in activations; here trained weights meet it
unprepared.
"""
