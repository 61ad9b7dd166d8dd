// Activation φ on latents, with the deferred scaling by ρ = 1/rms of an online norm. The formulas are those
// of cpu/src/kernels/latent.rs.
//
// h is [rows, columns] and holds up to four latents side by side; latent i has a separate result
// [rows, w_i]. All are contiguous. Without φ, h → ρ·h; with it, h → SiLU(ρ·h). A result may be h itself:
// each thread reads only the elements that it writes.
#include "activation.cuh"
#include "reduce.cuh"

constexpr int SECTIONS = 4;

template <class T, int V>
DEVICE void latent_forward(const T* h, T* const (&z)[SECTIONS], const u32 (&widths)[SECTIONS],
                    const float* s, u32 rows, u32 columns, float width, float epsilon, u32 phi) {
    const RowTeam team = row_team(rows);
    if (!team.live) return;
    const float rho = s ? inverse_rms(s[team.row], width, epsilon) : 1.0f;
    h += team.row * columns;
#pragma unroll
    for (int section = 0; section < SECTIONS; section++) {
        T* to = z[section] + team.row * widths[section];
        each<V>(widths[section], team.lane, team.lanes, [&](auto count, u32 column) {
            constexpr int COUNT = decltype(count)::value;
            float values[COUNT];
            load(h + column, values);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const float u = rho * values[i];
                values[i] = phi ? silu(u) : u;
            }
            store(to + column, values);
        });
        h += widths[section];
    }
}

// dh = ρ·dz⊙φ'(ρ·h). With DEFERRED also ds (+)= −(ρ²/2d)·Σ dh·h over all latents. Without φ, DEFERRED reads
// z = ρ·h instead of h and sums dz·z; without φ and DEFERRED, dz is the only input.
template <class T, int V, bool DEFERRED>
DEVICE void latent_backward(const T* const (&dz)[SECTIONS], const T* h, const T* const (&z)[SECTIONS],
                         const u32 (&widths)[SECTIONS], const float* s, T* dh, float* ds, u32 rows,
                         u32 columns, float width, float epsilon, u32 phi, u32 add) {
    const RowTeam team = row_team(rows);
    float projection = 0.0f, rho = 1.0f;
    if (team.live) {
        if constexpr (DEFERRED) rho = inverse_rms(s[team.row], width, epsilon);
        u64 first = team.row * columns;
#pragma unroll
        for (int section = 0; section < SECTIONS; section++) {
            const u64 row = team.row * widths[section];
            each<V>(widths[section], team.lane, team.lanes, [&](auto count, u32 column) {
                constexpr int COUNT = decltype(count)::value;
                float of_dz[COUNT], saved[COUNT], of_dh[COUNT];
                load(dz[section] + row + column, of_dz);
                if (phi) {
                    load(h + first + column, saved);
#pragma unroll
                    for (int i = 0; i < COUNT; i++) {
                        of_dh[i] = rho * of_dz[i] * silu_derivative(rho * saved[i]);
                        if constexpr (DEFERRED) projection += of_dh[i] * saved[i];
                    }
                } else {
                    if constexpr (DEFERRED) load(z[section] + row + column, saved);
#pragma unroll
                    for (int i = 0; i < COUNT; i++) {
                        of_dh[i] = rho * of_dz[i];
                        if constexpr (DEFERRED) projection += of_dz[i] * saved[i];
                    }
                }
                store(dh + first + column, of_dh);
            });
            first += widths[section];
        }
    }
    if constexpr (DEFERRED) {
        projection = over_row<Sum>(projection);
        if (team.live && team.lane == 0) {
            const float before = add ? ds[team.row] : 0.0f;
            ds[team.row] = before - rho * rho / (2.0f * width) * projection;
        }
    }
}

#define LATENTS(T, V, ending)                                                                      \
    KERNEL(256, 4, latent_##ending, const T* h, T* z0, T* z1, T* z2, T* z3, u32 w0, u32 w1,        \
           u32 w2, u32 w3, u32 rows, u32 columns, u32 phi) {                                       \
        latent_forward<T, V>(h, {z0, z1, z2, z3}, {w0, w1, w2, w3}, nullptr, rows, columns, 1, 0, phi);   \
    }                                                                                              \
    KERNEL(256, 4, latent_recover_##ending, const T* h, T* z0, T* z1, T* z2, T* z3, u32 w0,        \
           u32 w1, u32 w2, u32 w3, const float* s, u32 rows, u32 columns, u32 phi, float width,    \
           float epsilon) {                                                                        \
        latent_forward<T, V>(h, {z0, z1, z2, z3}, {w0, w1, w2, w3}, s, rows, columns, width, epsilon,     \
                      phi);                                                                        \
    }                                                                                              \
    KERNEL(256, 4, latent_backward_##ending, const T* dz0, const T* dz1, const T* dz2,             \
           const T* dz3, u32 w0, u32 w1, u32 w2, u32 w3, const T* h, T* dh, u32 rows,              \
           u32 columns, u32 phi) {                                                                 \
        latent_backward<T, V, false>({dz0, dz1, dz2, dz3}, h, {h, h, h, h}, {w0, w1, w2, w3},         \
                                  nullptr, dh, nullptr, rows, columns, 1, 0, phi, 0);              \
    }                                                                                              \
    KERNEL(256, 4, latent_recover_backward_##ending, const T* dz0, const T* dz1, const T* dz2,     \
           const T* dz3, u32 w0, u32 w1, u32 w2, u32 w3, const T* h, const T* z0, const T* z1,     \
           const T* z2, const T* z3, const float* s, T* dh, float* ds, u32 rows, u32 columns,      \
           u32 phi, float width, float epsilon, u32 add) {                                         \
        latent_backward<T, V, true>({dz0, dz1, dz2, dz3}, h, {z0, z1, z2, z3}, {w0, w1, w2, w3}, s,   \
                                 dh, ds, rows, columns, width, epsilon, phi, add);                 \
    }
EACH_FORMAT(LATENTS)
