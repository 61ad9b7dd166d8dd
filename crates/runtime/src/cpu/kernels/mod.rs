//! What one device computes: products, attention and fused passes on slices of f32.
