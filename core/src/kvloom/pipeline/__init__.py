"""One request across the tiers: load, store, layer by layer, and the copies to and from the engine's KV.

Layer by layer, beside the computation:

with engine.retrieve_layer(tokens, mask, kv=kv) as loading:     with engine.store_layer(tokens, kv=kv) as storing:
    for layer, mask in loading:                                     for layer in range(num_layers):
        compute(layer)  # of the tokens that mask lacks                 compute(layer)
                                                                        storing.layer(layer)
                                                                    storing.finish()
"""
