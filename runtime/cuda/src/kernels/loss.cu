// Cross-entropy over a shard of the vocabulary, in the three passes of cpu/src/kernels/loss.rs.
//
// logits [rows, columns] begin at token id `first`; maximum is [rows]; packed is [rows, 2]: the sum of
// exp(logit − maximum), and the logit of the target, 0 where another device holds it. A row whose target is
// IGNORED has no loss and no gradient.
#include "reduce.cuh"

constexpr u32 IGNORED = 0xffffffffu;

template <class T, int V>
DEVICE float lane_maximum(const T* logits, u32 columns, const RowTeam& team) {
    float max_logit = Maximum::identity();
    each<V>(columns, team.lane, team.lanes, [&](auto size, u32 column) {
        float values[decltype(size)::value];
        load(logits + column, values);
#pragma unroll
        for (float value : values) max_logit = fmaxf(max_logit, value);
    });
    return max_logit;
}

template <class T, int V>
DEVICE float lane_exp_sum(const T* logits, float maximum, u32 columns, const RowTeam& team) {
    float sum = 0.0f;
    each<V>(columns, team.lane, team.lanes, [&](auto size, u32 column) {
        float values[decltype(size)::value];
        load(logits + column, values);
#pragma unroll
        for (float value : values) sum += expf(value - maximum);
    });
    return sum;
}

// Replaces the logits with (softmax − onehot)·factor.
template <class T, int V>
DEVICE void loss_gradient(T* logits, const float* maximum, const float* packed, const u32* targets,
                      u32 rows, u32 columns, u32 first, float factor) {
    const RowTeam team = row_team(rows);
    if (!team.live) return;
    const u32 target = targets[team.row] - first;  // Beyond all columns where another device holds it.
    const bool ignored = targets[team.row] == IGNORED;
    const float max_logit = maximum[team.row], share = factor / packed[2 * team.row];
    logits += team.row * columns;
    each<V>(columns, team.lane, team.lanes, [&](auto size, u32 column) {
        constexpr int COUNT = decltype(size)::value;
        float values[COUNT];
        load(logits + column, values);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float gradient = expf(values[i] - max_logit) * share - (column + i == target ? factor : 0.0f);
            values[i] = ignored ? 0.0f : gradient;
        }
        store(logits + column, values);
    });
}

// The sum of the losses of these rows times `factor`, in f64, in one block. Also added to the loss of the step.
KERNEL(256, 1, loss_total, const float* maximum, const float* packed, const u32* targets, float* loss,
       double* step, u32 rows, float factor) {
    double sum = 0.0;
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) {
        if (targets[row] == IGNORED) continue;
        sum += double(maximum[row]) + log(double(packed[2 * row])) - double(packed[2 * row + 1]);
    }
    sum = over_block(sum) * double(factor);
    if (threadIdx.x == 0) {
        *loss = float(sum);
        *step += sum;
    }
}

#define LOSS(T, V, ending)                                                                        \
    KERNEL(256, 4, loss_maximum_##ending, const T* logits, float* maximum, u32 rows,              \
           u32 columns) {                                                                         \
        const RowTeam team = row_team(rows);                                                      \
        float max_logit = Maximum::identity();                                                    \
        if (team.live) max_logit = lane_maximum<T, V>(logits + team.row * columns, columns, team);\
        max_logit = over_row<Maximum>(max_logit);                                                 \
        if (team.live && team.lane == 0) maximum[team.row] = max_logit;                           \
    }                                                                                             \
    KERNEL(256, 4, loss_sum_##ending, const T* logits, const float* maximum, const u32* targets,  \
           float* packed, u32 rows, u32 columns, u32 first) {                                     \
        const RowTeam team = row_team(rows);                                                      \
        logits += team.row * columns;                                                             \
        float sum = 0.0f;                                                                         \
        if (team.live) sum = lane_exp_sum<T, V>(logits, maximum[team.row], columns, team);        \
        sum = over_row<Sum>(sum);                                                                 \
        if (team.live && team.lane == 0) {                                                        \
            const u32 target = targets[team.row] - first;                                         \
            packed[2 * team.row] = sum;                                                           \
            packed[2 * team.row + 1] = target < columns ? widen(logits[target]) : 0.0f;           \
        }                                                                                         \
    }                                                                                             \
    KERNEL(256, 4, loss_gradient_##ending, T* logits, const float* maximum, const float* packed,  \
           const u32* targets, u32 rows, u32 columns, u32 first, float factor) {                  \
        loss_gradient<T, V>(logits, maximum, packed, targets, rows, columns, first, factor);      \
    }
EACH_FORMAT(LOSS)
