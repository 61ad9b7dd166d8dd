// SiLU, the activation φ of latents and gates, and its derivative.
#pragma once
#include "device.cuh"

DEVICE float sigmoid(float u) { return 1.0f / (1.0f + expf(-u)); }

DEVICE float silu(float u) { return u * sigmoid(u); }

DEVICE float silu_derivative(float u) {
    const float s = sigmoid(u);
    return s * (1.0f + u * (1.0f - s));
}
