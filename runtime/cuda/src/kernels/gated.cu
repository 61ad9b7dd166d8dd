// Gated product: gate⊙up (CoLA), or SiLU(gate)⊙up (SwiGLU).
//
// All operands are [rows, columns]. Rows of gate, up and their gradients have a stride, since both may be
// columns of one matrix.
#include "activation.cuh"

template <class T, int V>
DEVICE void gated_forward(const T* gate, const T* up, T* y, u32 gate_stride, u32 up_stride, u32 rows,
                  u32 columns, u32 phi) {
    const RowTeam team = row_team(rows);
    if (!team.live) return;
    gate += team.row * gate_stride;
    up += team.row * up_stride;
    y += team.row * columns;
    each<V>(columns, team.lane, team.lanes, [&](auto count, u32 column) {
        constexpr int COUNT = decltype(count)::value;
        float of_gate[COUNT], of_up[COUNT];
        load(gate + column, of_gate);
        load(up + column, of_up);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            of_up[i] *= phi ? silu(of_gate[i]) : of_gate[i];
        }
        store(y + column, of_up);
    });
}

template <class T, int V>
DEVICE void gated_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, u32 gate_stride,
                       u32 up_stride, u32 dgate_stride, u32 dup_stride, u32 rows, u32 columns,
                       u32 phi) {
    const RowTeam team = row_team(rows);
    if (!team.live) return;
    dy += team.row * columns;
    gate += team.row * gate_stride;
    up += team.row * up_stride;
    dgate += team.row * dgate_stride;
    dup += team.row * dup_stride;
    each<V>(columns, team.lane, team.lanes, [&](auto count, u32 column) {
        constexpr int COUNT = decltype(count)::value;
        float of_dy[COUNT], of_gate[COUNT], of_up[COUNT];
        load(dy + column, of_dy);
        load(gate + column, of_gate);
        load(up + column, of_up);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float u = of_gate[i];
            of_gate[i] = of_dy[i] * of_up[i] * (phi ? silu_derivative(u) : 1.0f);
            of_up[i] = of_dy[i] * (phi ? silu(u) : u);
        }
        store(dgate + column, of_gate);
        store(dup + column, of_up);
    });
}

#define GATED(T, V, ending)                                                                     \
    KERNEL(256, 4, gated_product_##ending, const T* gate, const T* up, T* y, u32 gate_stride,   \
           u32 up_stride, u32 rows, u32 columns, u32 phi) {                                     \
        gated_forward<T, V>(gate, up, y, gate_stride, up_stride, rows, columns, phi);                   \
    }                                                                                           \
    KERNEL(256, 4, gated_product_backward_##ending, const T* dy, const T* gate, const T* up,    \
           T* dgate, T* dup, u32 gate_stride, u32 up_stride, u32 dgate_stride, u32 dup_stride,  \
           u32 rows, u32 columns, u32 phi) {                                                    \
        gated_backward<T, V>(dy, gate, up, dgate, dup, gate_stride, up_stride, dgate_stride,        \
                         dup_stride, rows, columns, phi);                                       \
    }
EACH_FORMAT(GATED)
