// A fiber: a stack that is switched to and from explicitly. Processors without a switch written here use ucontext,
// which makes a system call on every switch.
#pragma once
#include <cstdlib>

constexpr unsigned long FIBER_STACK = 64 * 1024;

// The memory of a stack, which is allocated when a fiber starts on it and is never freed.
struct Stack {
    char* memory = nullptr;
    char* allocated() {
        if (!memory) memory = static_cast<char*>(aligned_alloc(64, FIBER_STACK));
        if (!memory) abort();
        return memory;
    }
};

#if defined(__x86_64__) && defined(__ELF__)

struct Fiber {
    void* top = nullptr;
};

// Saves the callee-saved registers on the current stack and restores those of the other.
extern "C" void narrows_switch_stacks(void** from, void* to);
asm(R"(
    .text
    .local narrows_switch_stacks
    .type narrows_switch_stacks, @function
narrows_switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size narrows_switch_stacks, . - narrows_switch_stacks
)");

inline void start_fiber(Fiber& fiber, Stack& stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack.allocated() + FIBER_STACK);
    *--top = nullptr;  // Aligns the stack as after a call.
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fiber.top = top;
}

inline void switch_fiber(Fiber& from, Fiber& to) { narrows_switch_stacks(&from.top, to.top); }

#else
#include <ucontext.h>

struct Fiber {
    ucontext_t context;
};

inline void start_fiber(Fiber& fiber, Stack& stack, void (*entry)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack.allocated();
    fiber.context.uc_stack.ss_size = FIBER_STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}

inline void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif
