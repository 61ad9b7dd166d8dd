//! The devices of one stage, as far as a test needs them: passes and attention are launches that the
//! shim runs, products are what cublasLtMatmul takes, executed as it is documented, collectives are
//! made in the order of the devices.

use std::collections::{BTreeMap, HashMap};

use narrows_plan::emit::Split;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::{
    Access, Action, Buffer, BufferId, Exchange, Instr, Phase, Program, Reduction, Region,
};
use narrows_plan::{DType, Dim};
use narrows_runtime::cuda::launch::{self, rotary_table};
use narrows_runtime::cuda::products::{self, Setting};
use narrows_runtime::cuda::{Device, bounds};
use narrows_runtime::order::{self, Moment};
use narrows_runtime::parameters::logical_name;
use narrows_runtime::place;

use super::case::Aligned;
use super::matmul::execute;
use super::numbers::{bf16_bits, of_bf16};
use super::shim::{self, Memories, Order};

/// Whole tensors by the logical name of their parameter, row-major.
pub type Whole = BTreeMap<String, Vec<f32>>;

pub struct Machine<'a> {
    program: &'a Program,
    arenas: Vec<Aligned>,
    /// The loss that each device has seen.
    pub losses: Vec<[f64; 1]>,
    rotary: Vec<f32>,
}

impl<'a> Machine<'a> {
    /// Memory that is not a number, but for weights and for gradients, which are zero.
    pub fn new(program: &'a Program, weights: &Whole) -> Machine<'a> {
        let devices = program.context.tensor();
        let stage = &program.stages[0];
        let arena = || Aligned::of(&vec![0xff; stage.arena.0 as usize]);
        let head_dim = stage.forward.iter().find_map(|instr| match &instr.action {
            Action::Attention(attention) => Some(attention.head_dim),
            _ => None,
        });
        let positions = program.context.workload.sequence_length;
        let theta = program.constants.rope_theta;
        let mut machine = Machine {
            program,
            arenas: (0..devices).map(|_| arena()).collect(),
            losses: vec![[0.0]; devices as usize],
            rotary: rotary_table(positions, head_dim.unwrap_or(2), theta),
        };
        for device in 0..devices as usize {
            for buffer in &stage.buffers {
                match buffer.region {
                    Region::Weight => machine
                        .each_number(device, buffer, |name, element| Some(weights[name][element])),
                    Region::Gradient => machine.each_number(device, buffer, |_, _| Some(0.0)),
                    _ => {}
                }
            }
        }
        machine
    }

    /// The gradients of all parameters.
    pub fn gradients(&mut self, like: &Whole) -> Whole {
        let mut found: Whole =
            like.iter().map(|(name, of)| (name.clone(), vec![f32::NAN; of.len()])).collect();
        let stage = &self.program.stages[0];
        for device in 0..self.arenas.len() {
            for buffer in stage.buffers.iter().filter(|buffer| buffer.region == Region::Gradient) {
                let numbers = self.read(device, buffer.offset, buffer.extent.columns, DType::F32);
                let mut at = numbers.into_iter();
                self.each_number(device, buffer, |name, element| {
                    found.get_mut(name).expect("a parameter")[element] =
                        at.next().expect("a number");
                    None
                });
            }
        }
        found
    }

    /// Visits the numbers of a parameter's buffer in order, with the name and the element that each
    /// is; what is given back is put there.
    fn each_number(
        &mut self,
        device: usize,
        buffer: &Buffer,
        mut visit: impl FnMut(&str, usize) -> Option<f32>,
    ) {
        let Some(shard) = &buffer.shard else { return };
        let devices = self.program.context.tensor();
        let part = |size: u64, split| if shard.split == split { size / devices } else { size };
        let members: Vec<_> = shard
            .members
            .iter()
            .zip(&shard.offset_stride)
            .map(|((name, rows, columns), stride)| {
                // A tied head is stored as its transpose.
                let tied = self.program.tied && name == "head";
                let name = if tied { "embedding".into() } else { logical_name(&buffer.name, name) };
                let held = (part(*rows, Split::Rows), part(*columns, Split::Columns));
                let begin = |split| if shard.split == split { stride * device as u64 } else { 0 };
                let first = (begin(Split::Rows), begin(Split::Columns));
                let turn = |(a, b): (u64, u64)| if tied { (b, a) } else { (a, b) };
                (name, turn(held), turn(first), turn((*rows, *columns)).1)
            })
            .collect();
        let rows = members[0].1.0;
        let mut at = buffer.offset;
        for row in 0..rows {
            for (name, held, first, whole) in &members {
                for column in 0..held.1 {
                    let element = (first.0 + row) * whole + first.1 + column;
                    if let Some(number) = visit(name, element as usize) {
                        self.put(device, at, buffer.extent.dtype, &[number]);
                    }
                    at += buffer.extent.dtype.width();
                }
            }
        }
    }

    fn read(&mut self, device: usize, begin: u64, count: u64, dtype: DType) -> Vec<f32> {
        let bytes = &self.arenas[device].bytes()[begin as usize..][..dtype.bytes(count).0 as usize];
        match dtype {
            DType::Bf16 => {
                bytes.chunks_exact(2).map(|b| of_bf16(u16::from_le_bytes([b[0], b[1]]))).collect()
            }
            _ => bytemuck::cast_slice(bytes).to_vec(),
        }
    }

    fn put(&mut self, device: usize, begin: u64, dtype: DType, numbers: &[f32]) {
        let bytes: Vec<u8> = match dtype {
            DType::Bf16 => numbers.iter().flat_map(|x| bf16_bits(*x).to_le_bytes()).collect(),
            _ => bytemuck::cast_slice(numbers).to_vec(),
        };
        self.arenas[device].bytes()[begin as usize..][..bytes.len()].copy_from_slice(&bytes);
    }

    fn operand(&mut self, device: usize, access: &Access, slot: u64) -> Vec<f32> {
        let begin = place::range(&self.program.stages[0], access, slot).start;
        let extent = access.extent;
        self.read(device, begin, extent.rows * extent.columns, extent.dtype)
    }

    fn result(&mut self, device: usize, access: &Access, slot: u64, numbers: &[f32]) {
        let begin = place::range(&self.program.stages[0], access, slot).start;
        self.put(device, begin, access.extent.dtype, numbers);
    }

    /// Forward and backward of all microbatches, and the reductions of gradients. `None` where
    /// nothing compiles kernels for processors.
    pub fn run(&mut self, tokens: &[u32], targets: &[u32]) -> Option<()> {
        let program = self.program;
        let mut loaded = None;
        for moment in order::step(&program.stages[0]) {
            if moment.phase != Phase::Step && loaded != Some((moment.phase, moment.microbatch)) {
                loaded = Some((moment.phase, moment.microbatch));
                self.load(moment.microbatch, tokens, targets);
            }
            match &moment.instr.action {
                Action::Collective(exchange) => self.exchange(exchange, &moment),
                Action::Pass(_) if moment.phase == Phase::Step => {}
                action => {
                    for device in 0..self.arenas.len() {
                        match action {
                            Action::Gemm(_) => self.product(device, &moment),
                            _ => self.pass(device, &moment)?,
                        }
                    }
                }
            }
        }
        Some(())
    }

    /// Token ids and targets of every device's rows.
    fn load(&mut self, microbatch: u64, tokens: &[u32], targets: &[u32]) {
        let context = self.program.context;
        let (work, devices) = (context.workload, context.tensor());
        let first = microbatch * work.tokens();
        for buffer in &self.program.stages[0].buffers {
            let ids = match (buffer.region, buffer.name.as_str()) {
                (Region::Input, "tokens") => tokens,
                (Region::Input, "targets") => targets,
                _ => continue,
            };
            for device in 0..devices {
                let mine = |token: u64| match context.token_dim() {
                    _ if buffer.extent.rows == context.tokens() => true,
                    Some(Dim::Position) => {
                        let position = token % work.sequence_length;
                        position / (work.sequence_length / devices) == device
                    }
                    _ => token / (context.tokens() / devices) == device,
                };
                let ids: Vec<f32> = (0..context.tokens())
                    .filter(|token| mine(*token))
                    .map(|token| f32::from_bits(ids[(first + token) as usize]))
                    .collect();
                self.put(device as usize, buffer.offset, DType::U32, &ids);
            }
        }
    }

    fn pass(&mut self, at: usize, moment: &Moment) -> Option<()> {
        let decays = HashMap::new();
        let device = device(self.program, at, &decays);
        let made = launch::pass(&device, moment).unwrap_or_else(|error| panic!("{error}"));
        bounds::check(&device, moment, &made).unwrap_or_else(|error| panic!("{error}"));
        let mut scratch = Aligned::of(&vec![0xff; made.scratch_bytes as usize]);
        for launch in &made.launches {
            let mut memory = Memories {
                arena: self.arenas[at].bytes(),
                scratch: scratch.bytes(),
                rotary: &mut self.rotary,
                coefficients: &mut [],
                loss: &mut self.losses[at],
            };
            let done = shim::kernels(launch.family)?.run(launch, &mut memory, Order::Ascending);
            done.unwrap_or_else(|error| panic!("{}: {error}", launch.kernel));
        }
        Some(())
    }

    fn product(&mut self, at: usize, moment: &Moment) {
        let decays = HashMap::new();
        let device = device(self.program, at, &decays);
        let workspace = products::workspace((9, 0));
        let setting = Setting { device: &device, tied: self.program.tied, workspace };
        let matmul = products::matmul(&setting, moment).unwrap_or_else(|error| panic!("{error}"));
        let touched = bounds::check_product(&device, moment, &matmul);
        touched.unwrap_or_else(|error| panic!("{error}"));
        execute(self.arenas[at].bytes(), &matmul);
    }

    /// Sums are made in f32 and rounded once.
    fn exchange(&mut self, exchange: &Exchange, moment: &Moment) {
        let Instr { reads, writes, .. } = moment.instr;
        let devices = self.arenas.len();
        for (from, to) in reads.iter().zip(writes) {
            let sent: Vec<Vec<f32>> =
                (0..devices).map(|device| self.operand(device, from, moment.slot)).collect();
            let combined = || -> Vec<f32> {
                let combine = |a: f32, b: f32| match exchange.reduction {
                    Reduction::Sum => a + b,
                    Reduction::Maximum => a.max(b),
                };
                let at = |i: usize| sent.iter().map(|sent| sent[i]).reduce(combine).expect("one");
                (0..sent[0].len()).map(at).collect()
            };
            let part = sent[0].len() / devices;
            for device in 0..devices {
                let mine = device * part..(device + 1) * part;
                let made: Vec<f32> = match exchange.kind {
                    CollectiveKind::AllReduce => combined(),
                    CollectiveKind::ReduceScatter => combined()[mine].to_vec(),
                    CollectiveKind::AllGather => sent.concat(),
                    CollectiveKind::AllToAll => {
                        sent.iter().flat_map(|sent| sent[mine.clone()].to_vec()).collect()
                    }
                };
                self.result(device, to, moment.slot, &made);
            }
        }
    }
}

fn device<'a>(
    program: &'a Program,
    tensor: usize,
    decays: &'a HashMap<BufferId, bool>,
) -> Device<'a> {
    Device {
        context: &program.context,
        constants: &program.constants,
        stage: &program.stages[0],
        tensor: tensor as u64,
        data: 0,
        decays,
    }
}
