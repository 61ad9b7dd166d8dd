// SiLU, as φ on latents and on gates.
#pragma once
#include "device.cuh"

DEVICE float sigmoid(float u) { return 1.0f / (1.0f + expf(-u)); }

DEVICE float silu(float u) { return u * sigmoid(u); }

DEVICE float silu_slope(float u) {
    const float share = sigmoid(u);
    return share * (1.0f + u * (1.0f - share));
}
